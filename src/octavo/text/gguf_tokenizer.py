"""A tokenizer from a GGUF file's own metadata (keys tokenizer.ggml.*).

Two models exist: "gpt2", byte-level BPE with ranked merges, where tokenizer.ggml.pre names how the family
    splits text before merging; and "llama", SentencePiece's BPE with scores. Both are built as the model's
    own tokenizer.json would be, which differs from llama.cpp in one place: Qwen2 normalizes text to NFC
    first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers.models import BPE

from octavo.errors import LoadError, UnsupportedError
from octavo.text.chat_template import ChatTemplate
from octavo.text.fast_tokenizer import FastTokenizer, TokenizerParts
from octavo.text.special import TURN_ENDS, SpecialToken
from octavo.text.vocabulary import Kind, Style, Vocabulary

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
_TEKKEN_WORDS = (_CASED % ("*", "+")) + "|" + (_CASED % ("+", "*")) + r"|\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_LLAMA3_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST


def _gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_words() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _words(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family's tokenizer does before merging.

    Attributes:
        words: builds the splitter.
        nfc: whether text is normalized first.
        ignore_merges: whether a word that is a token is taken at once.
        adds_bos: whether texts start with the begin token where the file does not say.
    """

    words: Callable[[], Any]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT2 = _Family(_gpt2_words)
_QWEN2 = _Family(lambda: _words(_QWEN2_WORDS), nfc=True)
_LLAMA3 = _Family(lambda: _words(_LLAMA3_WORDS), ignore_merges=True, adds_bos=True)

#: By tokenizer.ggml.pre.
_FAMILIES: Mapping[str, _Family] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _Family(_smollm_words),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _Family(lambda: _words(_TEKKEN_WORDS), ignore_merges=True, adds_bos=True),
}

#: Names of GGUF's token ids, and what chat templates call those tokens.
_TEMPLATE_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> FastTokenizer:
    """Raises LoadError for incomplete metadata, UnsupportedError naming a tokenizer that is not built."""
    return _Builder(metadata, where).build()


class _Builder:
    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where
        self.pieces = list(self.strings("tokens"))
        types = self.get("token_type")
        if types is None:
            self.kinds = bytes([Kind.NORMAL]) * len(self.pieces)
        else:
            self.kinds = np.asarray(types, dtype=np.uint8).tobytes()
        if len(self.kinds) != len(self.pieces):
            raise LoadError(f"{where}: {len(self.pieces)} tokens but {len(self.kinds)} token types")

    # Metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def strings(self, key: str) -> Sequence[str]:
        value = self.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise LoadError(f"{self.where}: no list of strings tokenizer.ggml.{key} in the metadata")
        return value

    def switch(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self.where}: tokenizer.ggml.{key} must be true or false, is {value!r}")
        return value

    def token_id(self, name: str) -> int | None:
        value = self.get(f"{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.pieces):
            raise LoadError(f"{self.where}: tokenizer.ggml.{name}_token_id {value!r} is outside the vocabulary")
        return value

    def of_kind(self, *kinds: Kind) -> list[int]:
        """Ids of all tokens of these kinds."""
        return [int(i) for i in np.flatnonzero(np.isin(np.frombuffer(self.kinds, dtype=np.uint8), kinds))]

    # The parts

    def build(self) -> FastTokenizer:
        model = str(self.get("model"))
        style: Style
        if model == "gpt2":
            family = self.family()
            plain, style, adds_bos, space_prefix = (
                self.byte_level(family),
                "byte_level",
                family.adds_bos,
                False,
            )
        elif model == "llama":
            space_prefix = self.switch("add_space_prefix", True)
            plain, style, adds_bos = self.sentencepiece(space_prefix), "metaspace", True
        else:
            raise UnsupportedError(f"{self.where}: tokenizer.ggml.model {model!r} is not supported; gpt2 and llama are")
        bos, eos = self.token_id("bos"), self.token_id("eos")
        prefix = () if bos is None or not self.switch("add_bos_token", adds_bos) else (bos,)
        suffix = () if eos is None or not self.switch("add_eos_token", False) else (eos,)
        return FastTokenizer(
            TokenizerParts(
                vocabulary=Vocabulary(self.pieces, self.kinds, style),
                specials=tuple(SpecialToken(i, self.pieces[i]) for i in self.of_kind(Kind.CONTROL)),
                plain=plain,
                inner=plain,
                eos_token_ids=self.eos_ids(),
                bos_token_id=bos if prefix else None,
                prefix=prefix,
                suffix=suffix,
                template=self.template("tokenizer.chat_template"),
                tool_template=self.template("tokenizer.chat_template.tool_use"),
                strip_space=space_prefix,
            )
        )

    def eos_ids(self) -> frozenset[int]:
        named = (self.token_id(name) for name in ("eos", "eot", "eom"))
        known = {i for i in self.of_kind(Kind.CONTROL) if self.pieces[i] in TURN_ENDS}
        return frozenset(known.union(i for i in named if i is not None))

    def template(self, key: str) -> ChatTemplate | None:
        source = self.metadata.get(key)
        if not isinstance(source, str):
            return None
        ids = {name: self.token_id(name) for name in _TEMPLATE_TOKENS}
        tokens = {_TEMPLATE_TOKENS[name]: self.pieces[i] for name, i in ids.items() if i is not None}
        return ChatTemplate(source, tokens, self.where)

    def family(self) -> _Family:
        name = str(self.get("pre"))
        family = _FAMILIES.get(name)
        if family is None:
            raise UnsupportedError(
                f"{self.where}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
                f"supported: {', '.join(_FAMILIES)}"
            )
        return family

    def vocab(self) -> dict[str, int]:
        """Tokens that text may become. Control tokens are not among them: text never becomes one."""
        vocab = {piece: i for i, piece in enumerate(self.pieces)}
        for i in self.of_kind(Kind.CONTROL, Kind.UNKNOWN, Kind.UNUSED):
            vocab.pop(self.pieces[i], None)
        return vocab

    def with_user_tokens(self, tokenizer: PlainTokenizer) -> PlainTokenizer:
        user = self.of_kind(Kind.USER_DEFINED)
        tokenizer.add_tokens([AddedToken(self.pieces[i], normalized=False) for i in user])
        return tokenizer

    def bpe(self, merges: list[tuple[str, str]], **options: bool) -> PlainTokenizer:
        try:
            return PlainTokenizer(BPE(vocab=self.vocab(), merges=merges, **options))
        except Exception as error:  # the library raises nothing narrower
            raise LoadError(f"{self.where}: its vocabulary and merges do not fit together: {error}") from error

    def byte_level(self, family: _Family) -> PlainTokenizer:
        merges = _halves(self.strings("merges"), self.where)
        tokenizer = self.bpe(merges, ignore_merges=family.ignore_merges)
        if family.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = family.words()
        return self.with_user_tokens(tokenizer)

    def sentencepiece(self, space_prefix: bool) -> PlainTokenizer:
        """Of all neighbours whose union is a token, the best-scored are joined first.

        The prefix goes before a text and, as in llama.cpp and in the tokenizer.json of the models of this
        kind, before text that follows an added token.
        """
        byte_pieces = {self.pieces[i] for i in self.of_kind(Kind.BYTE)}
        if not {f"<0x{b:02X}>" for b in range(256)} <= byte_pieces:
            raise UnsupportedError(f"{self.where}: a SentencePiece vocabulary without its 256 byte tokens")
        tokenizer = self.bpe(self.scored_merges(), byte_fallback=True)
        spaces = normalizers.Replace(" ", "▁")
        prefixed = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.normalizer = prefixed if space_prefix else spaces
        return self.with_user_tokens(tokenizer)

    def scored_merges(self) -> list[tuple[str, str]]:
        """Ways to join two tokens into one, the best-scored result first; needs distinct scores."""
        scores = self.get("scores")
        if scores is None or len(scores) != len(self.pieces):
            raise LoadError(f"{self.where}: tokenizer.ggml.scores is missing or not as long as the vocabulary")
        scores = np.asarray(scores, dtype=np.float64).tolist()
        # Only ordinary tokens come about by joining; byte and user-defined ones do not.
        normal = self.of_kind(Kind.NORMAL)
        known = {self.pieces[i] for i in normal}
        merges: list[tuple[str, str]] = []
        previous = None
        for i in sorted(normal, key=lambda i: -scores[i]):
            piece = self.pieces[i]
            cuts = range(len(piece) - 1, 0, -1)
            halves = [(piece[:k], piece[k:]) for k in cuts if piece[:k] in known and piece[k:] in known]
            if not halves:
                continue
            if scores[i] == previous:
                raise UnsupportedError(
                    f"{self.where}: tokenizer.ggml.scores: several tokens have the score {scores[i]:g}, "
                    f"so the order in which text is joined is not known"
                )
            previous = scores[i]
            merges += halves
        return merges


def _halves(merges: Sequence[str], where: str) -> list[tuple[str, str]]:
    """ "a b" -> ("a", "b") for a whole list at once."""
    halves = " ".join(merges).split(" ")
    if len(halves) != 2 * len(merges):
        raise LoadError(f"{where}: tokenizer.ggml.merges: an entry is not two tokens with a space between")
    return list(zip(halves[::2], halves[1::2], strict=True))
