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
        return self._check(self._detokenizer.push(token))

    def finish(self) -> Emitted:
        """The choice has ended otherwise: what was held back, up to a stop string that may still be in it."""
        last = self._check(self._detokenizer.finish())
        if last.stop is not None:
            return last
        return Emitted(last.text + self._stop.finish())

    def _check(self, text: str) -> Emitted:
        result = self._stop.push(text)
        return Emitted(result.text, result.stop)
