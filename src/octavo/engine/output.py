"""From tokens to the text of one choice: detokenized without splitting characters, ended at stop strings."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.stop import StopChecker
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Emitted:
    """Text that may go out now, and the stop string that ended the choice, if one did."""

    text: str
    stop: str | None = None


class ChoiceText:
    """The text of one choice as it grows."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopChecker(stop)

    def push(self, token: int) -> Emitted:
        return self._emitted(self._stop.push(self._detokenizer.push(token)))

    def finish(self) -> Emitted:
        """The choice has ended otherwise: what was held back, up to a stop string that may still be in it."""
        text = self._stop.push(self._detokenizer.finish())
        return self._emitted(text if self._stop.matched is not None else text + self._stop.finish())

    def _emitted(self, text: str) -> Emitted:
        return Emitted(text, self._stop.matched)
