"""How many bytes a cache takes. The arena allocates by these numbers, so a plan made from them is what is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cache.format import Form, PageFormat, build_format, open_format
from octavo.cache.spec import CacheSpec
from octavo.errors import ConfigError

#: Frames are multiples of this; the arena asks the system for huge pages, which this keeps in step with.
FRAME_ALIGN = 64 * 1024
#: A frame may leave this share of itself unused for any page class before a larger one is tried.
MAX_FRAME_WASTE = 0.02
#: Frames larger than this many of the largest page would make small budgets coarse.
MAX_PAGES_OF_LARGEST = 8


@dataclass(frozen=True)
class Footprint:
    """Sizes of one model's cache under one pair of codecs.

    Attributes:
        sealed, open: the two page classes' formats.
        frame_bytes: the unit in which the arena hands memory to a class.
        n_frames: frames that the budget holds.
    """

    sealed: PageFormat
    open: PageFormat
    frame_bytes: int
    n_frames: int

    @property
    def page_size(self) -> int:
        return self.sealed.page_size

    @property
    def sealed_per_frame(self) -> int:
        return self.frame_bytes // self.sealed.page_bytes

    @property
    def open_per_frame(self) -> int:
        return self.frame_bytes // self.open.page_bytes

    @property
    def arena_bytes(self) -> int:
        return self.n_frames * self.frame_bytes

    def frames_for(self, tokens_per_sequence: Sequence[int]) -> int:
        """Frames that these sequences need at once, sharing nothing: sealed pages, and an open page each."""
        sealed = sum(n // self.page_size for n in tokens_per_sequence)
        return -(-sealed // self.sealed_per_frame) + -(-len(tokens_per_sequence) // self.open_per_frame)

    def max_tokens_alone(self) -> int:
        """The longest sequence that fits when it is the only one."""
        if self.n_frames < 1:
            return 0
        return (self.n_frames - 1) * self.sealed_per_frame * self.page_size + self.page_size - 1


def plan(spec: CacheSpec, page_size: int, key_codec: str, value_codec: str, budget_bytes: int) -> Footprint:
    """The footprint within a budget. Raises ConfigError when not even one page of each class fits."""
    (group,) = spec.groups
    sealed = build_format(group, page_size, Form(key_codec, value_codec))
    opened = open_format(group, page_size)
    frame = frame_bytes_for((sealed.page_bytes, opened.page_bytes))
    n_frames = budget_bytes // frame
    if n_frames < 2:
        raise ConfigError(
            f"the KV memory budget of {budget_bytes:,} bytes holds no sealed page beside an open one: "
            f"this model with page size {page_size} needs at least {2 * frame:,} bytes "
            f"(--kv-memory {-(-2 * frame // 2**20)}MiB)"
        )
    return Footprint(sealed, opened, frame, n_frames)


def frame_bytes_for(page_bytes: Sequence[int]) -> int:
    """The smallest frame that wastes at most MAX_FRAME_WASTE for every class, else the least wasteful one."""
    largest = max(page_bytes)
    best, best_waste = 0, 2.0
    for frame in range(_aligned(largest), _aligned(MAX_PAGES_OF_LARGEST * largest) + 1, FRAME_ALIGN):
        waste = max((frame % size) / frame for size in page_bytes)
        if waste <= MAX_FRAME_WASTE:
            return frame
        if waste < best_waste:
            best, best_waste = frame, waste
    return best


def _aligned(n: int) -> int:
    return -(-n // FRAME_ALIGN) * FRAME_ALIGN
