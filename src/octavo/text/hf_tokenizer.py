"""A tokenizer from Hugging Face files: tokenizer.json, and what stands beside it.

What tokenizer.json says is followed, also where transformers would build the tokenizer anew from its class.
Read too, where they exist: tokenizer_config.json, special_tokens_map.json, chat_template.jinja and
additional_chat_templates/tool_use.jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as PlainTokenizer

from octavo.errors import LoadError, UnsupportedError
from octavo.text.chat_template import ChatTemplate
from octavo.text.fast_tokenizer import FastTokenizer, TokenizerParts
from octavo.text.special import TURN_ENDS, SpecialToken
from octavo.text.vocabulary import Kind, Style, Vocabulary

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def tokenizer_from_directory(directory: Path, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> FastTokenizer:
    """Raises LoadError for missing or damaged files, UnsupportedError for other kinds of tokenizer.

    `vocab_size` and `eos_token_ids` are those of the model's configs; end tokens of the tokenizer are added.
    """
    return _Builder(directory, vocab_size).build(frozenset(eos_token_ids))


class _Builder:
    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.directory, self.vocab_size = directory, vocab_size
        self.path = directory / "tokenizer.json"
        if not self.path.is_file():
            others = [n for n in ("tokenizer.model", "vocab.json", "tekken.json") if (directory / n).is_file()]
            hint = (
                f" ({', '.join(others)} alone is not enough; transformers' save_pretrained writes it)" if others else ""
            )
            raise LoadError(f"{directory}: no tokenizer.json{hint}")
        try:
            self.full = PlainTokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises nothing narrower
            raise LoadError(f"{self.path}: cannot be read: {error}") from error
        self.full.no_truncation()
        self.full.no_padding()
        self.config = self.read("special_tokens_map.json") | self.read("tokenizer_config.json")

    def read(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(value, dict):
            raise LoadError(f"{path}: not a JSON object")
        return value

    def state(self, part: Any) -> dict[str, Any]:
        """A part of the tokenizer as its JSON; {} for None."""
        return {} if part is None else json.loads(part.__getstate__())

    def build(self, eos_token_ids: frozenset[int]) -> FastTokenizer:
        model = type(self.full.model).__name__
        if model != "BPE":
            raise UnsupportedError(f"{self.path}: a model of type {model}; only BPE is supported")
        style, strip_space = self.decoder()
        added = {i: token for i, token in self.full.get_added_tokens_decoder().items() if i < self.vocab_size}
        specials = tuple(
            SpecialToken(i, t.content, t.lstrip, t.rstrip, t.single_word) for i, t in sorted(added.items()) if t.special
        )
        vocabulary = self.vocabulary(added, style)
        kept = [token for _, token in sorted(added.items()) if not token.special]
        plain = self.without_specials(kept, self.full.pre_tokenizer)
        inner_split = self.inner_pre_tokenizer()
        inner = plain if inner_split is None else self.without_specials(kept, inner_split)
        ids = {token.content: i for i, token in added.items()}
        renumbered = {}
        for token in kept:
            own = plain.token_to_id(token.content)
            if own is not None and own != ids[token.content]:
                renumbered[own] = ids[token.content]

        prefix, suffix = self.affixes()
        bos, eos = self.special_id("bos_token"), self.special_id("eos_token")
        prefix, suffix = self.affix("add_bos_token", bos, prefix), self.affix("add_eos_token", eos, suffix)
        turn_ends = {token.id for token in specials if token.text in TURN_ENDS}
        ends = eos_token_ids | turn_ends | (frozenset() if eos is None else {eos})
        template, tool_template = self.templates()
        tokenizer = FastTokenizer(
            TokenizerParts(
                vocabulary=vocabulary,
                specials=specials,
                plain=plain,
                inner=inner,
                eos_token_ids=frozenset(i for i in ends if 0 <= i < self.vocab_size),
                bos_token_id=bos if bos is not None and bos in prefix else None,
                prefix=prefix,
                suffix=suffix,
                renumbered=renumbered,
                template=template,
                tool_template=tool_template,
                strip_space=strip_space,
            )
        )
        for special in specials:
            if special.id in tokenizer.encode(special.text, add_special=False):
                raise UnsupportedError(
                    f"{self.path}: plain text {special.text!r} becomes the control token of that name"
                )
        return tokenizer

    # Parts

    def decoder(self) -> tuple[Style, bool]:
        """How tokens become text, and whether the first token's space is dropped."""
        state = self.state(self.full.decoder)
        steps = state.get("decoders", [state])
        kinds = [step.get("type") for step in steps]
        if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse", "ByteFallback"}:
            return "byte_level", False
        if kinds == ["Metaspace"]:
            return "metaspace", steps[0].get("prepend_scheme", "always") != "never"
        plain = [s for s in steps if s.get("type") not in ("ByteFallback", "Fuse")]
        if plain and _replaces_metaspace(plain[0]):
            if len(plain) == 1:
                return "metaspace", False
            if len(plain) == 2 and plain[1].get("type") == "Strip" and plain[1].get("content") == " ":
                return "metaspace", plain[1].get("start", 0) == 1
        raise UnsupportedError(f"{self.path}: a decoder of {kinds}; byte-level and SentencePiece ones are supported")

    def vocabulary(self, added: Mapping[int, Any], style: Style) -> Vocabulary:
        pieces, kinds = [""] * self.vocab_size, bytearray([Kind.UNUSED]) * self.vocab_size
        for piece, i in self.full.get_vocab(with_added_tokens=False).items():
            if i >= self.vocab_size:
                raise LoadError(
                    f"{self.path}: token {piece!r} has id {i}, config.json's vocab_size is {self.vocab_size}"
                )
            pieces[i] = piece
            is_byte = style == "metaspace" and _BYTE.fullmatch(piece)
            kinds[i] = Kind.BYTE if is_byte else Kind.NORMAL
        for i, token in added.items():
            pieces[i] = token.content
            kinds[i] = Kind.CONTROL if token.special else Kind.USER_DEFINED
        return Vocabulary(pieces, bytes(kinds), style)

    def without_specials(self, kept: list[Any], pre_tokenizer: Any) -> PlainTokenizer:
        """The same model and normalizer, with only the added tokens that are not special."""
        tokenizer = PlainTokenizer(self.full.model)
        if self.full.normalizer is not None:
            tokenizer.normalizer = self.full.normalizer
        if pre_tokenizer is not None:
            tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.add_tokens(kept)
        return tokenizer

    def inner_pre_tokenizer(self) -> Any:
        """The splitter for text after a control token, where only the first word gets a space before it."""
        state = self.state(self.full.pre_tokenizer)
        if '"prepend_scheme": "first"' not in json.dumps(state):
            return None
        blank = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": _never_prepend(state),
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        }
        return PlainTokenizer.from_str(json.dumps(blank)).pre_tokenizer

    def affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the post-processor puts before and after a text."""
        for probe in ("a", "1", ".", "\n"):
            bare = self.full.encode(probe, add_special_tokens=False).ids
            if bare:
                break
        else:
            raise UnsupportedError(f"{self.path}: its vocabulary has no tokens for plain text")
        ids = self.full.encode(probe, add_special_tokens=True).ids
        for start in range(len(ids) - len(bare) + 1):
            if ids[start : start + len(bare)] == bare:
                return tuple(ids[:start]), tuple(ids[start + len(bare) :])
        raise UnsupportedError(f"{self.path}: its post-processor changes a text's tokens")

    def affix(self, switch: str, token_id: int | None, found: tuple[int, ...]) -> tuple[int, ...]:
        """tokenizer_config.json may switch a token on or off, against tokenizer.json."""
        wanted = self.config.get(switch)
        if not isinstance(wanted, bool):
            return found
        return (token_id,) if wanted and token_id is not None else ()

    def special_text(self, name: str) -> str | None:
        value = self.config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) and value else None

    def special_id(self, name: str) -> int | None:
        text = self.special_text(name)
        found: int | None = None if text is None else self.full.token_to_id(text)
        return found if found is not None and found < self.vocab_size else None

    def templates(self) -> tuple[ChatTemplate | None, ChatTemplate | None]:
        """The default template, and the one for requests with tools where there is another."""
        sources: dict[str, str] = {}
        value = self.config.get("chat_template")
        if isinstance(value, str):
            sources["default"] = value
        elif isinstance(value, list):
            entries = [entry for entry in value if isinstance(entry, dict)]
            sources |= {str(entry.get("name")): str(entry.get("template", "")) for entry in entries}
        for name, file in (
            ("default", "chat_template.jinja"),
            ("tool_use", "additional_chat_templates/tool_use.jinja"),
        ):
            if (self.directory / file).is_file():
                sources[name] = (self.directory / file).read_text(encoding="utf-8")
        names = [name for name in self.config if name.endswith("_token")]
        variables = {name: text for name in names if (text := self.special_text(name)) is not None}
        built = {
            name: ChatTemplate(source, variables, str(self.directory))
            for name, source in sources.items()
            if name in ("default", "tool_use")
        }
        return built.get("default"), built.get("tool_use")


def _replaces_metaspace(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": "▁"} and step.get("content") == " "


def _never_prepend(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: "never" if (k, v) == ("prepend_scheme", "first") else _never_prepend(v) for k, v in state.items()}
    return [_never_prepend(v) for v in state] if isinstance(state, list) else state
