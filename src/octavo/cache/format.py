"""Page formats: where in a page each layer's keys and values lie, and by which codec."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cache.spec import CacheSpec
from octavo.codecs.base import Codec, Plane, Role
from octavo.codecs.registry import get_codec

#: Planes start at multiples of this many bytes, so that kernels may use aligned loads.
PLANE_ALIGN = 64


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
    """(layer, key | value) -> codec and byte offset. A page is one contiguous run of bytes over all its layers.

    Layers follow one another, keys before values within a layer.
    """

    name: str
    page_size: int
    keys: tuple[PlacedPlane, ...]
    values: tuple[PlacedPlane, ...]
    page_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes that codecs write; page_bytes less alignment."""
        return sum(p.n_bytes for p in (*self.keys, *self.values))

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / self.page_size


def build_format(spec: CacheSpec, page_size: int, key_codec: str, value_codec: str) -> PageFormat:
    """A format with the same two codecs in every layer.

    Keys are rotated only where the model has no key bias; values always (codecs that do not rotate ignore it).
    """
    group = spec.group
    kc, vc = get_codec(key_codec), get_codec(value_codec)
    k_plane = Plane(Role.KEY, page_size, group.n_kv_heads, group.head_dim, rotate=not group.key_bias)
    v_plane = Plane(Role.VALUE, page_size, group.n_kv_heads, group.head_dim, rotate=True)
    keys, values, offset = [], [], 0
    for _ in range(group.n_layers):
        keys.append(PlacedPlane(kc, k_plane, offset))
        offset = _aligned(offset + keys[-1].n_bytes)
        values.append(PlacedPlane(vc, v_plane, offset))
        offset = _aligned(offset + values[-1].n_bytes)
    name = key_codec if key_codec == value_codec else f"k_{key_codec}+v_{value_codec}"
    return PageFormat(name, page_size, tuple(keys), tuple(values), offset)


def open_format(spec: CacheSpec, page_size: int) -> PageFormat:
    """The form of an open page: activations exactly, float32."""
    return build_format(spec, page_size, "f32", "f32")


def _aligned(n: int) -> int:
    return -(-n // PLANE_ALIGN) * PLANE_ALIGN
