"""A tokenizer from a GGUF file's own metadata (keys tokenizer.ggml.*)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers.models import BPE

from octavo.errors import LoadError, UnsupportedError
from octavo.text.chat_template import ChatTemplate
from octavo.text.fast_tokenizer import FastTokenizer, TokenizerParts
from octavo.text.special import SpecialToken
from octavo.text.vocabulary import Kind, Vocabulary

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


class _Pre:
    """How a family splits text before merging: `ignore_merges` takes a whole word that is a token at once."""

    def __init__(self, build: Any, *, nfc: bool = False, ignore_merges: bool = False, add_bos: bool = False) -> None:
        self.build, self.nfc, self.ignore_merges, self.add_bos = build, nfc, ignore_merges, add_bos


_GPT2_PRE = _Pre(_gpt2)
_LLAMA3_PRE = _Pre(lambda: _split(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2_PRE = _Pre(lambda: _split(_QWEN2), nfc=True)

#: tokenizer.ggml.pre -> what the original tokenizer of that family does before merging.
_PRE: Mapping[str, _Pre] = {
    "gpt-2": _GPT2_PRE,
    "default": _GPT2_PRE,
    "smollm": _Pre(_smollm),
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
}

#: Control tokens that end a turn, whatever key names them: written the same in all families that have them.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> FastTokenizer:
    """Raises LoadError for incomplete metadata, UnsupportedError naming a tokenizer that is not built."""
    return _Builder(metadata, where).build()


class _Builder:
    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where
        self.pieces = list(self.strings("tokens"))
        types = self.get("token_type")
        self.kinds = (
            bytes([Kind.NORMAL]) * len(self.pieces) if types is None else np.asarray(types, dtype=np.uint8).tobytes()
        )

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def strings(self, key: str) -> Sequence[str]:
        value = self.get(key)
        if value is None:
            raise LoadError(f"{self.where}: no tokenizer.ggml.{key} in the metadata")
        return value  # type: ignore[no-any-return]

    def token_id(self, key: str) -> int | None:
        value = self.get(f"{key}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.pieces):
            raise LoadError(f"{self.where}: tokenizer.ggml.{key}_token_id {value!r} is outside the vocabulary")
        return value

    def build(self) -> FastTokenizer:
        model = self.get("model")
        if model != "gpt2":
            raise UnsupportedError(f"{self.where}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2")
        name = self.get("pre")
        pre = _PRE.get(name)
        if pre is None:
            raise UnsupportedError(
                f"{self.where}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
                f"supported: {', '.join(_PRE)}"
            )
        plain = self.byte_level(pre)
        bos = self.token_id("bos")
        add_bos = bool(self.get("add_bos_token", pre.add_bos)) and bos is not None
        add_eos, eos = bool(self.get("add_eos_token", False)), self.token_id("eos")
        parts = TokenizerParts(
            vocabulary=Vocabulary(self.pieces, self.kinds, "byte_level"),
            specials=tuple(SpecialToken(i, self.pieces[i]) for i in self.of_kind(Kind.CONTROL)),
            plain=plain,
            inner=plain,
            eos_token_ids=self.eos_ids(),
            bos_token_id=bos if add_bos else None,
            prefix=(bos,) if add_bos and bos is not None else (),
            suffix=(eos,) if add_eos and eos is not None else (),
            template=self.template("tokenizer.chat_template"),
            tool_template=self.template("tokenizer.chat_template.tool_use"),
        )
        return FastTokenizer(parts)

    def template(self, key: str) -> ChatTemplate | None:
        source = self.metadata.get(key)
        if not isinstance(source, str):
            return None
        ids = {name: self.token_id(name) for name in ("bos", "eos", "unknown", "padding")}
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        return ChatTemplate(
            source, {names[name]: self.pieces[i] for name, i in ids.items() if i is not None}, self.where
        )

    def of_kind(self, kind: Kind) -> list[int]:
        return [int(i) for i in np.flatnonzero(np.frombuffer(self.kinds, dtype=np.uint8) == kind)]

    def byte_level(self, pre: _Pre) -> PlainTokenizer:
        vocab = {piece: i for i, piece in enumerate(self.pieces)}
        for i in self.of_kind(Kind.CONTROL) + self.of_kind(Kind.UNUSED):
            vocab.pop(self.pieces[i], None)
        tokenizer = PlainTokenizer(BPE(vocab=vocab, merges=self.merges(), ignore_merges=pre.ignore_merges))
        if pre.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre.build()
        tokenizer.add_tokens([AddedToken(self.pieces[i], normalized=False) for i in self.of_kind(Kind.USER_DEFINED)])
        return tokenizer

    def merges(self) -> list[tuple[str, str]]:
        merges = self.strings("merges")
        halves = " ".join(merges).split(" ")
        if len(halves) != 2 * len(merges):
            raise LoadError(f"{self.where}: tokenizer.ggml.merges: an entry is not two tokens with a space between")
        return list(zip(halves[::2], halves[1::2], strict=True))

    def eos_ids(self) -> frozenset[int]:
        named = (self.token_id(key) for key in ("eos", "eot", "eom"))
        known = {i for i in self.of_kind(Kind.CONTROL) if self.pieces[i] in _TURN_ENDS}
        return frozenset(known.union(i for i in named if i is not None))
