"""Pages and who holds them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cache.arena import Arena, PageClass, PageHandle

#: Page classes of the arena.
SEALED: PageClass = 0
OPEN: PageClass = 1


@dataclass(slots=True, eq=False)
class Page:
    """A page in the arena. `ref_count` counts its holders: block tables, and the prefix tree once it is published."""

    handle: PageHandle
    page_class: PageClass
    ref_count: int = 1


def release(page: Page, arena: Arena) -> None:
    """Drop one hold; the last holder frees the page."""
    if page.ref_count <= 0:
        raise ValueError(f"page {page.handle} released more often than held")
    page.ref_count -= 1
    if page.ref_count == 0:
        arena.free(page.handle)
