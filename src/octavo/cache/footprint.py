"""How many bytes a cache takes. The arena allocates by these numbers, so a plan made from them is what is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.cache.classes import PageClass, PageClasses
from octavo.cache.format import Form
from octavo.cache.spec import CacheSpec
from octavo.errors import ConfigError

#: Frames are multiples of this; the arena asks the system for huge pages, which this keeps in step with.
FRAME_ALIGN = 64 * 1024
#: A frame may leave this share of itself unused for any page class before a larger one is tried.
MAX_FRAME_WASTE = 0.02
#: Frames larger than this many of the largest page would make small budgets coarse.
MAX_PAGES_OF_LARGEST = 8
#: No sequence is longer.
MAX_TOKENS = 1 << 31


@dataclass(frozen=True)
class Footprint:
    """Sizes of one model's cache.

    Attributes:
        classes: all page classes, with their formats.
        frame_bytes: the unit in which the arena hands memory to a class.
        n_frames: frames that the budget holds.
    """

    classes: PageClasses
    frame_bytes: int
    n_frames: int

    @property
    def page_size(self) -> int:
        return self.classes.page_size

    @property
    def arena_bytes(self) -> int:
        return self.n_frames * self.frame_bytes

    def per_frame(self, page_class: PageClass) -> int:
        """Pages of this class in one frame."""
        return self.frame_bytes // page_class.page_bytes

    def bytes_per_token(self, form: str | None = None) -> float:
        """Bytes that each token of a long sequence adds in sealed pages of a form (None: the default one)."""
        form = form or self.classes.default_form
        groups = range(len(self.classes.spec.groups))
        return sum(self.classes.sealed(g, form).format.bytes_per_token for g in groups)

    def frames_holding(self, pages: Mapping[int, int]) -> int:
        """Frames that so many pages of each class (by index) fill when packed."""
        return sum(-(-n // self.per_frame(self.classes[index])) for index, n in pages.items())

    def pages_for(self, n_tokens: int, form: str | None = None) -> Counter[int]:
        """Pages, by class index, that one sequence of so many tokens holds, sharing nothing: its full pages sealed,
        and an open page in each group."""
        form = form or self.classes.default_form
        pages: Counter[int] = Counter()
        for g, group in enumerate(self.classes.spec.groups):
            pages[self.classes.sealed(g, form).index] += group.pages_held(n_tokens, self.page_size)
            pages[self.classes.opened(g).index] += 1
        return pages

    def frames_for(self, tokens_per_sequence: Sequence[int], form: str | None = None) -> int:
        """Frames that these sequences need at once, sharing nothing."""
        pages: Counter[int] = Counter()
        for n_tokens in tokens_per_sequence:
            pages.update(self.pages_for(n_tokens, form))
        return self.frames_holding(pages)

    def max_tokens_alone(self, form: str | None = None) -> int:
        """The longest sequence that fits when it is the only one."""
        low, high = 0, MAX_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.frames_for([middle], form) <= self.n_frames:
                low = middle
            else:
                high = middle - 1
        return low


def plan(spec: CacheSpec, page_size: int, forms: Sequence[Form], budget_bytes: int) -> Footprint:
    """The footprint within a budget. Raises ConfigError when one page of each class that a sequence needs does not
    fit."""
    classes = PageClasses(spec, page_size, forms)
    frame = frame_bytes_for([page_class.page_bytes for page_class in classes])
    footprint = Footprint(classes, frame, budget_bytes // frame)
    # A sealed page of each group, and an open one.
    least = footprint.frames_for([page_size])
    if footprint.n_frames < least:
        raise ConfigError(
            f"the KV memory budget of {budget_bytes:,} bytes holds no sealed page beside an open one: "
            f"this model with page size {page_size} needs at least {least * frame:,} bytes "
            f"(--kv-memory {-(-least * frame // 2**20)}MiB)"
        )
    return footprint


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
