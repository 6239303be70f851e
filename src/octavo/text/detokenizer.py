"""Token ids to text, one at a time, for streaming."""

from __future__ import annotations

import codecs

from octavo.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns a sequence of tokens into text as it grows.

    All pushes joined equal `tokenizer.decode` of all tokens, except that bytes of an unfinished character at
    the end are never shown (decode shows U+FFFD for them) and that the space which SentencePiece puts before
    a text is kept: output continues a prompt. Bytes that cannot be UTF-8 give U+FFFD as soon as that is
    certain.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._token_bytes = tokenizer.token_bytes
        self._decode = _Utf8Decoder(errors="replace").decode

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character is unfinished."""
        data = self._token_bytes(token_id)
        if not data and not self._skip_special:
            data = self._tokenizer.decode((token_id,), skip_special=False).encode("utf-8")
        return self._decode(data)

    def finish(self) -> str:
        """The rest, always "": an unfinished character is dropped. The next push starts afresh."""
        self._decode = _Utf8Decoder(errors="replace").decode
        return ""
