"""Page classes: every (group, form) that a cache holds pages of. All that counts or sizes pages goes through these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cache.format import Form, PageFormat, build_format, open_format
from octavo.cache.spec import CacheSpec

#: What the form of open pages is called; sealed forms have the names of their codecs.
OPEN = "open"


@dataclass(frozen=True)
class PageClass:
    """Pages of one group in one form: all of one size.

    Attributes:
        index: its place among the cache's classes; arena and block tables name classes by it.
        group: index of the group in the model's CacheSpec.
        form: name of the sealed form, or OPEN.
    """

    index: int
    group: int
    form: str
    format: PageFormat

    @property
    def is_open(self) -> bool:
        return self.form == OPEN

    @property
    def page_bytes(self) -> int:
        return self.format.page_bytes


class PageClasses(Sequence[PageClass]):
    """The registry: for each group of the spec its open form and every sealed form."""

    def __init__(self, spec: CacheSpec, page_size: int, forms: Sequence[Form]) -> None:
        """`forms`: the sealed ones, the default first."""
        self.spec = spec
        self.page_size = page_size
        self.forms = tuple(dict.fromkeys(forms))
        self._all: list[PageClass] = []
        self._index: dict[tuple[int, str], PageClass] = {}
        for g, group in enumerate(spec.groups):
            for form in self.forms:
                self._add(g, form.name, build_format(group, page_size, form))
            self._add(g, OPEN, open_format(group, page_size))

    def _add(self, group: int, form: str, fmt: PageFormat) -> None:
        page_class = PageClass(len(self._all), group, form, fmt)
        self._all.append(page_class)
        self._index[group, form] = page_class

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._all[index]

    @property
    def default_form(self) -> str:
        return self.forms[0].name

    def sealed(self, group: int, form: str) -> PageClass:
        """Raises KeyError where no such form is registered."""
        return self._index[group, form]

    def opened(self, group: int) -> PageClass:
        return self._index[group, OPEN]
