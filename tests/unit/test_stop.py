"""Stop strings against a check of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.stop import StopChecker


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that ends first, the longest of those; what stands before it."""
    ends = sorted((text.find(s) + len(s), -len(s), s) for s in stops if s in text)
    if not ends:
        return text, None
    end, length, stop = ends[0]
    return text[: end + length], stop


def run(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(stops)
    shown = "".join(checker.push(chunk) for chunk in chunks)
    return shown + checker.finish(), checker.matched


alphabet = st.sampled_from("abc")
words = st.text(alphabet=alphabet, max_size=12)
stop_lists = st.lists(st.text(alphabet=alphabet, min_size=1, max_size=5), max_size=4)


@settings(max_examples=600, deadline=None)
@given(chunks=st.lists(words, max_size=8), stops=stop_lists)
def test_equals_the_naive_check(chunks: list[str], stops: list[str]) -> None:
    assert run(chunks, stops) == naive("".join(chunks), stops)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), data=st.data())
def test_stops_from_any_text(text: str, data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text(min_size=1, max_size=3), max_size=2))
    if text:
        at = data.draw(st.integers(0, len(text) - 1))
        stops.append(text[at : at + data.draw(st.integers(1, 6))])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(chunks, stops) == naive(text, stops)


@settings(max_examples=300, deadline=None)
@given(chunks=st.lists(words, max_size=8), stops=stop_lists)
def test_shows_all_it_can_and_no_more(chunks: list[str], stops: list[str]) -> None:
    """After every chunk exactly the part is held that is a prefix of a stop string."""
    checker = StopChecker(stops)
    shown = text = ""
    for chunk in chunks:
        shown += checker.push(chunk)
        text += chunk
        if checker.matched is not None:
            break
        held = max((k for s in stops for k in range(len(s)) if text.endswith(s[:k])), default=0)
        assert shown == text[: len(text) - held]


def test_nothing_after_a_match() -> None:
    checker = StopChecker(["END"])
    assert checker.push("aEN") == "a"
    assert checker.push("Dmore") == ""
    assert checker.matched == "END"
    assert checker.push("more") == ""
    assert checker.finish() == ""


def test_what_was_held_comes_at_the_end() -> None:
    checker = StopChecker(["END"])
    assert checker.push("the EN") == "the "
    assert checker.finish() == "EN"
    assert checker.matched is None


def test_the_longest_of_those_that_end_together() -> None:
    assert run(["xab"], ["b", "ab"]) == ("x", "ab")
    assert run(["xabc"], ["ab", "abc"]) == ("x", "ab")
    assert run(["xabcd"], ["bc", "abcd"]) == ("xa", "bc")


def test_long_stop_strings_stay_cheap() -> None:
    """Repetitive stop strings of thousands of characters; a quadratic check would take minutes."""
    stops = ["a" * 20_000 + "b", "a" * 19_999 + "c"]
    checker = StopChecker(stops)
    shown = sum(len(checker.push("a" * 100)) for _ in range(1000))
    assert shown == 100_000 - 20_000
    assert len(checker.finish()) == 20_000


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])
