"""The loops that find the machine's ceilings do what they count."""

from __future__ import annotations

import octavo.ops._cpu as _cpu
import pytest

from octavo.errors import UnsupportedError


@pytest.mark.parametrize("kind", ["f32", "i16", "i8"])
def test_arithmetic_takes_time_in_proportion(kind: str) -> None:
    """A loop that the compiler had done away with would seem faster the longer it is."""
    context = _cpu.Context(1, "auto")
    if context.isa == "portable":
        pytest.skip("no such loop in the portable path")
    short, long = (max(_cpu.peak_arithmetic(context, kind, n, 5)) for n in (20_000, 2_000_000))
    assert 1 < long < 20_000  # no core does 20 T operations per second
    assert long < 20 * short


def test_every_pass_is_given() -> None:
    context = _cpu.Context(2, "auto")
    passes = _cpu.read_bandwidth(context, 8 << 20, 3)
    assert len(passes) == 3
    assert all(p > 0 for p in passes)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="portable"):
        _cpu.peak_arithmetic(_cpu.Context(1, "portable"), "f32")
    with pytest.raises(ValueError, match='"i8", got "i4"'):
        _cpu.peak_arithmetic(_cpu.Context(1, "auto"), "i4")
