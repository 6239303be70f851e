"""Block tables: the pages of one sequence, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.cache.pages import Page
from octavo.cache.radix import Node, PrefixIdentity


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's view of the cache. Changed only by `manager.KVCache`.

    Attributes:
        pages: full pages, page i holding positions i * page_size onwards. During a step this includes the pages that
            the step will seal; outside one, len(pages) == num_computed_tokens // page_size.
        nodes: tree nodes of the first len(nodes) pages, the published ones.
        open_page: the exact page at the sequence's end; kept from its first use until the table is released.
        num_computed_tokens: tokens whose keys and values are in the pages.
    """

    identity: PrefixIdentity
    pages: list[Page] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    open_page: Page | None = None
    num_computed_tokens: int = 0
