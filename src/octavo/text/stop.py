"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class _Matcher:
    """Knuth-Morris-Pratt for one stop string: the longest prefix of it that the text so far ends with."""

    __slots__ = ("_fallback", "_pattern", "length")

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.length = 0
        #: fallback[i]: the longest proper prefix of pattern[: i + 1] that it also ends with.
        self._fallback = [0] * len(pattern)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[i] == pattern[length]
            self._fallback[i] = length

    def feed(self, text: str, end: int) -> int | None:
        """Read text[:end]; the index just past the first match, or None."""
        pattern, fallback, length = self._pattern, self._fallback, self.length
        i = 0
        while i < end:
            if length == 0:
                i = text.find(pattern[0], i, end)
                if i < 0:
                    break
            elif text[i] != pattern[length]:
                length = fallback[length - 1]
                continue
            length += 1
            i += 1
            if length == len(pattern):
                self.length = 0
                return i
        self.length = length
        return None


class StopChecker:
    """Passes text on until a stop string appears in it, however it is cut into pieces.

    The stop string that is complete first wins, the longest of those complete at the same character; the
    output ends before it. Text that may be the start of a stop string is held back until that is decided. The
    outcome depends on the text alone, not on the pieces.

    Attributes:
        matched: the stop string that appeared, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("an empty stop string matches everywhere")
        # Longest first, so that the first to end at a character is the one that starts first.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._matchers = [_Matcher(stop) for stop in self._stops]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; "" once a stop string has appeared."""
        if self.matched is not None:
            return ""
        if not self._matchers:
            return text
        end = len(text)
        for stop, matcher in zip(self._stops, self._matchers, strict=True):
            found = matcher.feed(text, end)
            if found is not None and (self.matched is None or found < end):
                self.matched, end = stop, found
        held = self._held + text
        if self.matched is not None:
            keep = len(self._held) + end - len(self.matched)
            self._held = ""
            return held[:keep]
        keep = len(held) - max(matcher.length for matcher in self._matchers)
        self._held = held[keep:]
        return held[:keep]

    def finish(self) -> str:
        """No more text comes: what was held back, since it is no stop string after all."""
        rest, self._held = self._held, ""
        return rest
