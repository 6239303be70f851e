"""Tokenizers from Hugging Face files against transformers reading the same files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from octavo.errors import LoadError, UnsupportedError
from octavo.text.fast_tokenizer import FastTokenizer
from octavo.text.hf_tokenizer import tokenizer_from_directory

CORPUS = "the cat sat on the mat, and then the other hat was there too; that is what it was. über 日本 ab abab"
SPECIALS = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    """As Llama 3: byte-level, control tokens after the vocabulary, a begin token in front."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<call>", normalized=False)])
    tokenizer.add_special_tokens(["<|last|>"])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                special_tokens=[("<|begin_of_text|>", begin)],
            ),
        ]
    )
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """As Llama 2 and Mistral: "▁" for spaces, byte fallback; scheme "legacy" puts the prefix in the
    normalizer.
    """
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator([CORPUS.replace(" ", "▁")] * 3, trainer)
    state = json.loads(trained.to_str())["model"]
    base = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {piece: i for i, piece in enumerate([*base, *state["vocab"]])}
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if scheme != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("[TOOL]", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def pair(folder: Path) -> tuple[FastTokenizer, Any]:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer_from_directory(folder, len(theirs)), theirs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[FastTokenizer, Any]]:
    base = tmp_path_factory.mktemp("tokenizers")
    llama = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = {
        "byte_level": pair(save(base / "bytes", byte_level(), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"))
    }
    for scheme in ("legacy", "first", "always", "never"):
        found[scheme] = pair(save(base / scheme, metaspace(scheme), **llama))
    return found


NAMES = ["byte_level", "legacy", "first", "always", "never"]
words = st.sampled_from(
    [
        "the",
        " cat",
        "  ",
        " ",
        "\n",
        "ab",
        "日本",
        "é",
        "👍",
        "<s>",
        "</s>",
        "<|eot_id|>",
        "<|last|>",
        "<think>",
        "[TOOL]",
    ]
)
texts = st.lists(words, max_size=10).map("".join) | st.text(max_size=15)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_reads_control_tokens_as_transformers_does(name: str, text: str, pairs: Any) -> None:
    ours, theirs = pairs[name]
    assert ours.encode(text, add_special=False, parse_special=True) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, parse_special=True) == theirs.encode(text)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_reads_plain_text_as_transformers_does(name: str, text: str, pairs: Any) -> None:
    ours, theirs = pairs[name]
    expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ours.encode(text, add_special=False) == expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_decodes_as_transformers_does(name: str, text: str, pairs: Any) -> None:
    ours, theirs = pairs[name]
    ids = theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special=skip) == expected


def test_facts(pairs: Any) -> None:
    ours, theirs = pairs["byte_level"]
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.vocab_size == len(theirs)
    think = theirs.convert_tokens_to_ids("<think>")
    assert ours.encode("a<think>b", add_special=False)[1] == think
    assert ours.token_bytes(think) == b"<think>"
    assert ours.token_bytes(theirs.eos_token_id) == b""
    ours, _ = pairs["legacy"]
    assert ours.bos_token_id == 1
    assert ours.eos_token_ids == {2}
    assert ours.token_bytes(3 + 0xE9) == b"\xe9"


def test_stripping_and_single_word_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        [
            AddedToken("<left>", special=True, lstrip=True, normalized=False),
            AddedToken("<right>", special=True, rstrip=True, normalized=False),
            AddedToken("<word>", special=True, single_word=True, normalized=False),
        ]
    )
    ours, theirs = pair(save(tmp_path, tokenizer))
    rng = random.Random(0)
    parts = ["<left>", "<right>", "<word>", " ", "  ", "\n", "a", "é", "<think>", "."]
    for _ in range(500):
        text = "".join(rng.choices(parts, k=6))
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False, parse_special=True) == expected, text


def test_begin_token_switches(tmp_path: Path) -> None:
    """tokenizer_config.json may switch the begin token off, or on where tokenizer.json has none."""
    off = save(tmp_path / "off", byte_level(), bos_token="<|begin_of_text|>", add_bos_token=False)
    ours = tokenizer_from_directory(off, 400)
    assert ours.bos_token_id is None
    assert ours.encode("a") == ours.encode("a", add_special=False)
    bare = byte_level()
    bare.post_processor = processors.ByteLevel(trim_offsets=False)
    on = save(tmp_path / "on", bare, bos_token={"content": "<|begin_of_text|>"}, add_bos_token=True)
    ours = tokenizer_from_directory(on, 400)
    assert ours.bos_token_id == bare.token_to_id("<|begin_of_text|>")
    assert ours.encode("a")[0] == ours.bos_token_id


def test_end_tokens(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), eos_token="<|last|>")
    ours = tokenizer_from_directory(folder, 400, eos_token_ids=[5, 9999])
    tokenizer = byte_level()
    assert ours.eos_token_ids == {5, tokenizer.token_to_id("<|last|>"), tokenizer.token_to_id("<|eot_id|>")}


def test_ids_above_the_tokenizers_own(tmp_path: Path) -> None:
    """Models pad their vocabulary; those ids stand for nothing, but are ids."""
    ours = tokenizer_from_directory(save(tmp_path, byte_level()), 512)
    assert ours.vocab_size == 512
    assert ours.token_bytes(511) == b""
    assert ours.decode([511]) == ""


def test_added_tokens_above_the_models_ids_are_not_read(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.token_to_id("<|last|>")
    ours = tokenizer_from_directory(save(tmp_path, tokenizer), size)
    assert max(ours.encode("<|last|>", parse_special=True)) < size


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    ours = tokenizer_from_directory(save(tmp_path, tokenizer), 400)
    assert ours.decode(ours.encode("the cat sat on the mat")) == "the cat sat on the mat"


def test_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]

    def rendered(folder: Path, **kwargs: Any) -> str:
        return tokenizer_from_directory(folder, 400).render_chat(messages, **kwargs)

    config = save(tmp_path / "a", byte_level(), chat_template="config {{ eos_token }}", eos_token="<|eot_id|>")
    assert rendered(config) == "config <|eot_id|>"
    (config / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert rendered(config) == "file"
    (config / "additional_chat_templates").mkdir()
    (config / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    assert rendered(config, tools=[{}]) == "tools"
    assert rendered(config) == "file"
    several = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    listed = save(tmp_path / "b", byte_level(), chat_template=several)
    assert rendered(listed) == "one"
    assert rendered(listed, tools=[{}]) == "two"
    assert not tokenizer_from_directory(save(tmp_path / "c", byte_level()), 400).has_chat_template


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no tokenizer\.json$"):
        tokenizer_from_directory(tmp_path, 10)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"no tokenizer\.json \(tokenizer\.model alone is not enough"):
        tokenizer_from_directory(tmp_path, 10)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(LoadError, match="cannot be read"):
        tokenizer_from_directory(tmp_path, 10)
    folder = save(tmp_path / "small", byte_level())
    with pytest.raises(LoadError, match="vocab_size is 100"):
        tokenizer_from_directory(folder, 100)
    (folder / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(LoadError, match="not a JSON object"):
        tokenizer_from_directory(folder, 400)


def test_other_kinds_of_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a model of type WordLevel"):
        tokenizer_from_directory(save(tmp_path / "a", Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))), 10)
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match=r"a decoder of \['WordPiece'\]"):
        tokenizer_from_directory(save(tmp_path / "b", tokenizer), 400)


def test_control_tokens_that_text_would_become(tmp_path: Path) -> None:
    """A control token inside a vocabulary whose merges lead to it: text could forge it."""
    vocab = {"a": 0, "b": 1, "ab": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["ab"])
    with pytest.raises(UnsupportedError, match="plain text 'ab' becomes the control token"):
        tokenizer_from_directory(save(tmp_path, tokenizer), 3)


def test_the_tiny_tokenizer(tiny_tokenizer: Path) -> None:
    ours, theirs = pair(tiny_tokenizer)
    messages = [{"role": "user", "content": "the <|im_end|> hat"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == text
    assert ours.apply_chat_template(messages).count(2) == 1
