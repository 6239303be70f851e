"""Page formats: where in a page each layer's planes lie, and by which codec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from octavo.cache.spec import CacheGroup
from octavo.codecs.base import Codec, Plane, Role
from octavo.codecs.registry import get_codec

#: Planes start at multiples of this many bytes, so that kernels may use aligned loads.
PLANE_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Form:
    """How pages are written: a codec for each role, by name."""

    key: str
    value: str

    @property
    def name(self) -> str:
        return self.key if self.key == self.value else f"k_{self.key}+v_{self.value}"

    def codec(self, role: Role) -> Codec:
        """Raises ConfigError where no codec has the name."""
        return get_codec({Role.KEY: self.key, Role.VALUE: self.value}[role])


#: The form of an open page: activations exactly.
OPEN_FORM = Form("f32", "f32")


@dataclass(frozen=True, slots=True)
class PlacedPlane:
    """One plane at its byte offset from the page's start."""

    codec: Codec
    plane: Plane
    offset: int

    @property
    def n_bytes(self) -> int:
        return self.codec.bytes_per_page(self.plane)


@dataclass(frozen=True)
class PageFormat:
    """(role, layer) -> codec and byte offset. A page is one contiguous run of bytes over all its group's layers.

    Layers follow one another; within a layer planes lie in the order in which the group names them. `planes[role][i]`
    is that of the group's i-th layer.
    """

    name: str
    page_size: int
    planes: Mapping[Role, tuple[PlacedPlane, ...]]
    page_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes that codecs write; page_bytes less alignment."""
        return sum(placed.n_bytes for placed in self.all_planes())

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / self.page_size

    def all_planes(self) -> Iterator[PlacedPlane]:
        for planes in self.planes.values():
            yield from planes


def build_format(group: CacheGroup, page_size: int, form: Form) -> PageFormat:
    """A format with the same codecs in every layer."""
    planes: dict[Role, list[PlacedPlane]] = {plane.role: [] for plane in group.planes(page_size)}
    offset = 0
    for _ in group.layers:
        for plane in group.planes(page_size):
            placed = PlacedPlane(form.codec(plane.role), plane, offset)
            planes[plane.role].append(placed)
            offset = _aligned(offset + placed.n_bytes)
    return PageFormat(form.name, page_size, {role: tuple(placed) for role, placed in planes.items()}, offset)


def open_format(group: CacheGroup, page_size: int) -> PageFormat:
    """The format of an open page."""
    return build_format(group, page_size, OPEN_FORM)


def _aligned(n: int) -> int:
    return -(-n // PLANE_ALIGN) * PLANE_ALIGN
