"""Tokenizers from GGUF metadata against independent implementations.

Where oracles differ from each other, the model's own tokenizer.json decides. Known differences: llama.cpp
does not normalize Qwen2's text to NFC, which Qwen's tokenizer does; transformers' conversion of GGUF files
normalizes neither, and forgets that SmolLM2 splits digits one by one.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import LoadError, RequestError, UnsupportedError
from octavo.models.loading.gguf import open_gguf
from octavo.text.fast_tokenizer import FastTokenizer
from octavo.text.gguf_tokenizer import tokenizer_from_gguf

HARD_TEXTS = [
    "",
    " ",
    "   a",
    "a   ",
    "\n\n\n",
    "\t\t x",
    "a\r\nb\r\n\r\n",
    "Hello  world   x",
    "don't we'll I'VE YOU'RE it'S 'ſ",
    "1234567890 12 3.14 ½ ² Ⅷ ٣",
    "日本語のテキスト 中文测试，你好。 한국어",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 🏳️‍🌈",
    "e\u0301 é a\u0308\u0323 \u1e0d\u0307 q\u0307\u0323",
    "\ufb01 \u2126 \u212b \u00c5",
    "\u200b\u200d\ufeff\u00a0\u2003x\u3000",
    "<|im_start|>user\nhi<|im_end|>",
    "<|endoftext|><tool_call>{}</tool_call>",
    "[PAD151934]<s></s><unk><0x0A>",
    "def f(x):\n    return x**2  # ok\n\n\n\nclass A:\n\tpass\n",
    "a" * 10_000,
    " " * 1_000,
    "\n " * 500,
    "नमस्ते दुनिया مرحبا שלום Ωμέγα ŐŰ",
    "x\u0300\u0301\u0302" * 5,
    "_.-/\\|~^`'\"!?@#$%&*()[]{}<>+=:;,",
    "\u2028\u2029\x0b\x0c\x85",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ｆｕｌｌ１２３ ﷺ",
    "\ue000\uf8ff\ufdd0",
]

texts = st.one_of(
    st.text(max_size=30),
    st.text(alphabet=" \t\n\r\u00a0'sStTrRe1290.,aZéñ日本👩\u200d\u0301<|>", max_size=40),
    st.lists(
        st.sampled_from(
            ["the", " quick", "  ", "\n", "don't", "I'LL", "12", "4.5e6", "foo_bar", "<|im_end|>", "é", "日"]
        ),
        max_size=10,
    ).map("".join),
)


# An oracle: byte-level BPE as GPT-2's paper describes it, word by word, with the regex package.

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NUMBERED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = NUMBERED.format(r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = NUMBERED.format(r"\p{N}{1,3}")


def byte_characters() -> list[str]:
    keep = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD)]
    extra = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(extra)) for b in range(256)]


def split_smollm(text: str) -> list[str]:
    words: list[str] = []
    for run in regex.findall(r"\p{N}|\P{N}+", text):
        words += regex.findall(GPT2, run)
    return words


class Bpe:
    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        split: Callable[[str], list[str]],
        whole: bool = False,
    ) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.split, self.whole, self.letters = split, whole, byte_characters()
        self.word = cache(self._word)

    def _word(self, word: str) -> list[int]:
        # A byte that the vocabulary lacks (0x16 in SmolLM2) goes before its neighbours merge, as in tokenizers.
        parts = [letter for letter in (self.letters[b] for b in word.encode()) if letter in self.ids]
        if self.whole and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                if tuple(parts[i : i + 2]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [self.ids[part] for part in parts]

    def encode(self, text: str) -> list[int]:
        return [i for word in self.split(text) for i in self.word(word)]


@pytest.fixture(scope="module")
def smollm_pair(smollm2: Path) -> tuple[FastTokenizer, Bpe]:
    metadata = open_gguf(smollm2).metadata
    oracle = Bpe(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], split_smollm)
    return tokenizer_from_gguf(metadata, "smollm2"), oracle


@pytest.fixture(scope="module")
def qwen_pair(qwen_coder: Path) -> tuple[FastTokenizer, Bpe]:
    metadata = open_gguf(qwen_coder).metadata

    def split(text: str) -> list[str]:
        return regex.findall(QWEN2, unicodedata.normalize("NFC", text))

    oracle = Bpe(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], split)
    return tokenizer_from_gguf(metadata, "qwen"), oracle


@pytest.mark.parametrize("text", HARD_TEXTS, ids=range(len(HARD_TEXTS)))
def test_hard_texts(text: str, smollm_pair: Any, qwen_pair: Any) -> None:
    if len(text) == 10_000:
        text = text[:2000]  # the oracle is quadratic
    ours, oracle = smollm_pair
    assert ours.encode(text, add_special=False) == oracle.encode(text)
    ours, oracle = qwen_pair
    if "tool_call" not in text:  # a token that is always read, which the oracle does not know
        assert ours.encode(text, add_special=False) == oracle.encode(text)


@settings(max_examples=400, deadline=None)
@given(text=texts)
@example(text=":\x16/")
def test_random_texts(text: str, smollm_pair: Any, qwen_pair: Any) -> None:
    for ours, oracle in (smollm_pair, qwen_pair):
        assert ours.encode(text, add_special=False) == oracle.encode(text)


def test_qwen_equals_transformers(qwen_coder: Path, qwen_pair: Any) -> None:
    """Qwen2Tokenizer of transformers, given the vocabulary and merges, control tokens read."""
    from transformers import AddedToken, Qwen2Tokenizer

    metadata = open_gguf(qwen_coder).metadata
    tokens, kinds = list(metadata["tokenizer.ggml.tokens"]), metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    theirs.add_tokens([AddedToken(tokens[i], special=True) for i in range(len(tokens)) if kinds[i] == 3])
    theirs.add_tokens([AddedToken(tokens[i], special=False) for i in range(len(tokens)) if kinds[i] == 4])
    ours, _ = qwen_pair
    rng = random.Random(3)
    words = [
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "user",
        "\n",
        " hi",
        "é",
        "e\u0301",
        "日本",
        "12",
        "  ",
        "<|",
    ]
    samples = HARD_TEXTS + ["".join(rng.choices(words, k=12)) for _ in range(200)]
    for text in samples:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False, parse_special=True) == expected
        assert ours.decode(expected, skip_special=False) == theirs.decode(expected, clean_up_tokenization_spaces=False)
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


# The contract


def test_facts_about_the_real_tokenizers(smollm_pair: Any, qwen_pair: Any) -> None:
    smollm, _ = smollm_pair
    assert smollm.vocab_size == 49152
    assert smollm.eos_token_ids == {0, 2}
    assert smollm.bos_token_id is None
    assert smollm.has_chat_template
    qwen, _ = qwen_pair
    assert qwen.vocab_size == 151936
    assert qwen.eos_token_ids == {151643, 151645}
    assert qwen.bos_token_id is None
    assert qwen.encode("", add_special=True) == []


def test_control_tokens_are_read_only_on_request(qwen_pair: Any) -> None:
    tokenizer, _ = qwen_pair
    text = "<|im_start|>user\nhi<|im_end|>"
    assert tokenizer.encode(text, parse_special=True) == [151644, 872, 198, 6023, 151645]
    plain = tokenizer.encode(text)
    assert not {151644, 151645} & set(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode([151644, 872, 198, 6023, 151645]) == "user\nhi"
    assert tokenizer.decode([151644, 872], skip_special=False) == "<|im_start|>user"


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="<|>im_startendofx ", max_size=60))
def test_plain_text_never_gives_a_control_token(text: str, smollm_pair: Any) -> None:
    tokenizer, _ = smollm_pair
    assert not any(tokenizer.token_bytes(i) == b"" for i in tokenizer.encode(text))


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_token_bytes_are_the_text(text: str, qwen_pair: Any) -> None:
    tokenizer, _ = qwen_pair
    ids = tokenizer.encode(text)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined == unicodedata.normalize("NFC", text).encode()
    assert tokenizer.decode(ids) == joined.decode()


def test_every_byte_has_a_token(qwen_pair: Any) -> None:
    tokenizer, _ = qwen_pair
    single = {tokenizer.token_bytes(i) for i in range(256)}
    assert single == {bytes([b]) for b in range(256)}


def test_half_a_surrogate_pair_is_a_request_error(smollm_pair: Any) -> None:
    tokenizer, _ = smollm_pair
    with pytest.raises(RequestError, match="character 3"):
        tokenizer.encode("abc\ud83d")


def test_threads_do_not_disturb_each_other(qwen_pair: Any) -> None:
    tokenizer, _ = qwen_pair
    samples = [f"{n} <|im_start|>word {n * 'é'} x" for n in range(60)]
    expected = [(tokenizer.encode(t), tokenizer.encode(t, parse_special=True)) for t in samples]

    def work(_: int) -> bool:
        found = [(tokenizer.encode(t), tokenizer.encode(t, parse_special=True)) for t in samples]
        return found == expected and [tokenizer.decode(ids) for ids, _ in found] == samples

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


@pytest.mark.parametrize("token_id", [-1, 49152, 10**9])
def test_ids_outside_the_vocabulary(token_id: int, smollm_pair: Any) -> None:
    tokenizer, _ = smollm_pair
    with pytest.raises(RequestError, match="outside the vocabulary of 49152"):
        tokenizer.decode([1, token_id])
    with pytest.raises(RequestError):
        tokenizer.token_bytes(token_id)


# Other families, on a small vocabulary


def small_metadata(pre: str, /, **changes: Any) -> dict[str, Any]:
    """GPT-2 alphabet plus a few merges and control tokens."""
    letters = byte_characters()
    merges = ["t h", "th e", "Ġ the", "1 2", "12 3", "a b", "ab c", "Ġ a", "' s", "Ċ Ċ"]
    tokens = ["<|begin|>", "<|eot_id|>", *letters, *(m.replace(" ", "") for m in merges), "abcabc", "<tool>"]
    kinds = [3, 3] + [1] * (len(tokens) - 3) + [4]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": kinds,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    values |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("pre", "pattern", "whole"),
    [
        ("gpt-2", GPT2, False),
        ("default", GPT2, False),
        ("qwen2", QWEN2, False),
        ("llama-bpe", LLAMA3, True),
        ("tekken", TEKKEN, True),
    ],
)
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abcthe 123's/!\n\r\tZéÄ日", max_size=30) | st.just("abcabc") | st.text(max_size=10))
def test_families(pre: str, pattern: str, whole: bool, text: str) -> None:
    metadata = small_metadata(pre)
    nfc = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    oracle = Bpe(
        metadata["tokenizer.ggml.tokens"][:-1],
        metadata["tokenizer.ggml.merges"],
        lambda t: regex.findall(pattern, t),
        whole,
    )
    assert tokenizer_from_gguf(metadata, "x").encode(text, add_special=False) == oracle.encode(nfc)


def test_begin_and_end_tokens() -> None:
    llama = tokenizer_from_gguf(small_metadata("llama-bpe"), "x")
    assert llama.bos_token_id == 0
    assert llama.encode("a")[0] == 0
    assert 0 not in llama.encode("a", add_special=False)
    assert llama.eos_token_ids == {1}
    off = tokenizer_from_gguf(small_metadata("llama-bpe", add_bos_token=False), "x")
    assert off.bos_token_id is None
    on = tokenizer_from_gguf(small_metadata("gpt-2", add_bos_token=True, add_eos_token=True), "x")
    assert on.encode("a") == [0, *on.encode("a", add_special=False), 1]


def test_user_defined_tokens_are_always_read() -> None:
    tokenizer = tokenizer_from_gguf(small_metadata("gpt-2"), "x")
    tool = tokenizer.vocab_size - 1
    assert tokenizer.encode("a<tool>b")[1] == tool
    assert tokenizer.token_bytes(tool) == b"<tool>"
    assert tokenizer.decode([tool]) == "<tool>"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": None}, UnsupportedError, "pre-tokenizer 'None'"),
        ({"pre": "deepseek-llm"}, UnsupportedError, "pre-tokenizer 'deepseek-llm'"),
        ({"model": "bert"}, UnsupportedError, "tokenizer.ggml.model 'bert'"),
        ({"model": None}, UnsupportedError, "tokenizer.ggml.model 'None'"),
        ({"tokens": None}, LoadError, "tokenizer.ggml.tokens"),
        ({"merges": None}, LoadError, "tokenizer.ggml.merges"),
        ({"merges": ["a b c"]}, LoadError, "not two tokens"),
        ({"merges": ["a zz"]}, LoadError, "merges"),
        ({"token_type": [1]}, LoadError, "token types"),
        ({"bos_token_id": 99999}, LoadError, "bos_token_id 99999"),
    ],
)
def test_incomplete_metadata(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(small_metadata("gpt-2", **changes), "x.gguf")


# SentencePiece


def sentencepiece_metadata(corpus: str, **changes: Any) -> dict[str, Any]:
    """A vocabulary as SentencePiece's BPE trainer makes it: bytes, then pieces by falling score."""
    from tokenizers import Tokenizer, models, trainers

    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    trained.train_from_iterator([corpus.replace(" ", "▁")] * 3, trainer)
    vocab = trained.get_vocab()
    pieces = [p for p in sorted(vocab, key=vocab.__getitem__) if len(p) > 1]
    letters = [p for p in sorted(vocab) if len(p) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *letters, "<tool>"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters)) + [4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))] + [0.0]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    values |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


CORPUS = "the cat sat on the mat, and then the other hat was there too; that is what it was. über 日本 ab abab"


def sentencepiece_oracle(metadata: dict[str, Any], text: str, prefix: bool) -> list[int]:
    """Join the best-scored neighbours, leftmost first, then spell unknown characters in bytes."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids = {t: i for i, t in enumerate(tokens) if kinds[i] == 1}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while True:
        joined = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joined:
            break
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    out: list[int] = []
    for part in parts:
        out += [ids[part]] if part in ids else [3 + b for b in part.encode()]
    return out


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=CORPUS + " \n", max_size=40) | st.text(max_size=12).filter(lambda t: "▁" not in t))
def test_sentencepiece(prefix: bool, text: str) -> None:
    metadata = sentencepiece_metadata(CORPUS, add_space_prefix=prefix)
    tokenizer = tokenizer_from_gguf(metadata, "x")
    ids = tokenizer.encode(text, add_special=False)
    assert ids == sentencepiece_oracle(metadata, text, prefix)
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == text
    joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
    assert joined == (" " + text if prefix and text else text)


def test_sentencepiece_control_and_user_tokens() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(CORPUS), "x")
    assert tokenizer.bos_token_id == 1
    assert not {0, 1, 2} & set(tokenizer.encode("<s></s><unk>", add_special=False))
    tool = tokenizer.vocab_size - 1
    assert tool in tokenizer.encode("a<tool>b")
    cat = tokenizer.encode("cat", add_special=False)
    assert tokenizer.encode("cat</s>cat", add_special=False, parse_special=True) == [*cat, 2, *cat]
    assert tokenizer.encode("<0x41>", add_special=False) != [3 + 0x41]
    assert tokenizer.decode([3 + 0xE2, 3 + 0x82, 3 + 0xAC]) == "€"
    assert tokenizer.decode([3 + 0xE2]) == "\ufffd"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": None}, LoadError, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, LoadError, "tokenizer.ggml.scores is missing or not as long"),
    ],
)
def test_sentencepiece_without_scores(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(sentencepiece_metadata(CORPUS, **changes), "x")


def test_sentencepiece_that_cannot_be_built() -> None:
    metadata = sentencepiece_metadata(CORPUS)
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(UnsupportedError, match="several tokens have the score -1000"):
        tokenizer_from_gguf(metadata, "x")
    metadata = sentencepiece_metadata(CORPUS)
    metadata["tokenizer.ggml.tokens"][3] = "<0x>"
    with pytest.raises(UnsupportedError, match="without its 256 byte tokens"):
        tokenizer_from_gguf(metadata, "x")
