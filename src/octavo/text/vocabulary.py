"""Token ids to the bytes they stand for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

from octavo.errors import LoadError, RequestError

Style = Literal["byte_level", "metaspace"]


class Kind(IntEnum):
    """What a token is. The numbers are those of GGUF's tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's byte-level alphabet, character -> byte: printable Latin-1 is itself, the rest 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {b: b for b in printable} | {256 + n: b for n, b in enumerate(others)}


#: For str.translate: a byte-level character -> the Latin-1 character of its byte.
_TO_LATIN1 = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Every token's string and kind.

    Two styles of string exist. "byte_level": each character is a byte of GPT-2's alphabet. "metaspace"
    (SentencePiece): "▁" is a space, "<0x0A>" a byte, the rest itself. Control, unknown and unused tokens
    stand for no bytes; a user-defined token stands for its string as it is.
    """

    def __init__(self, pieces: Sequence[str], kinds: bytes, style: Style) -> None:
        if len(pieces) != len(kinds):
            raise LoadError(f"tokenizer: {len(pieces)} tokens but {len(kinds)} token types")
        self.pieces, self.kinds, self.style = pieces, kinds, style
        self._bytes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    def token_bytes(self, token_id: int) -> bytes:
        """b"" for control tokens. Raises RequestError for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._decode(token_id)
        return found

    def is_control(self, token_id: int) -> bool:
        return self.kinds[token_id] in (Kind.CONTROL, Kind.UNKNOWN)

    def control_text(self, token_id: int) -> str:
        """How a control token is written; "" for any other token."""
        return self.pieces[token_id] if self.is_control(token_id) else ""

    def _decode(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self.pieces):
            raise RequestError(
                f"token id {token_id} is outside the vocabulary of {len(self.pieces)} tokens",
                param="token_ids",
            )
        piece, kind = self.pieces[token_id], self.kinds[token_id]
        if kind == Kind.USER_DEFINED:
            return piece.encode("utf-8")
        if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.UNUSED):
            return b""
        if self.style == "metaspace":
            match = _BYTE_TOKEN.fullmatch(piece)
            if match and kind == Kind.BYTE:
                return bytes([int(match.group(1), 16)])
            return piece.replace("▁", " ").encode("utf-8")
        try:
            return piece.translate(_TO_LATIN1).encode("latin-1")
        except UnicodeEncodeError:
            return piece.encode("utf-8")
