"""What the codecs share: the order of values in a plane, checks on input, and float16 scales rounded one way.

Order of values. A codec takes and gives [page_size, n_heads, head_dim]; it stores keys channel-major per
head, [n_heads, head_dim, page_size], so that a kernel holds tokens in vector lanes and needs no horizontal
sum for a score, and values token-major per head, [n_heads, page_size, head_dim], so that a kernel holds
channels in lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.codecs.base import F32, U8, Plane, Role
from octavo.errors import CodecRangeError

F16 = NDArray[np.float16]

#: The scale of a group that needs none (all values equal to the stored minimum): the smallest positive
#: float16.
MIN_SCALE = np.float16(2.0**-24)


def to_stored(x: F32, plane: Plane) -> F32:
    """[page_size, n_heads, head_dim] -> contiguous [n_heads, head_dim, page_size] (keys), [n_heads,
    page_size, head_dim]."""
    return np.ascontiguousarray(x.transpose(1, 2, 0) if plane.role is Role.KEY else x.transpose(1, 0, 2))


def from_stored(y: F32, plane: Plane) -> F32:
    """The inverse of `to_stored`."""
    return np.ascontiguousarray(y.transpose(2, 0, 1) if plane.role is Role.KEY else y.transpose(1, 0, 2))


def stored_shape(plane: Plane) -> tuple[int, int, int]:
    """The shape that `to_stored` gives."""
    if plane.role is Role.KEY:
        return plane.n_heads, plane.head_dim, plane.page_size
    return plane.n_heads, plane.page_size, plane.head_dim


def split_heads(n_heads: int, sizes: Sequence[int]) -> NDArray[np.int64]:
    """Where each head's bytes lie, int64 [n_heads, bytes / n_heads], in arrays of `sizes` bytes, one after the other,
    whose first axis is the head."""
    starts = np.cumsum([0, *sizes[:-1]])
    arrays = [start + np.arange(size).reshape(n_heads, -1) for start, size in zip(starts, sizes, strict=True)]
    return np.concatenate(arrays, axis=1)


def check_input(x: F32, plane: Plane, codec: str) -> F32:
    """x as float32 of the plane's shape. Raises ValueError on another shape, CodecRangeError on NaN or
    infinity."""
    shape = (plane.page_size, plane.n_heads, plane.head_dim)
    if x.shape != shape or x.dtype != np.float32:
        raise ValueError(f"{codec} encodes float32 {list(shape)}, got {x.dtype} {list(x.shape)}")
    require(np.isfinite(x), "a value is NaN or infinite", plane, codec, head_axis=1)
    return x


def check_bytes(data: U8, n_bytes: int, codec: str) -> U8:
    """data as a contiguous vector. Raises ValueError where its size or dtype is not the plane's."""
    if data.dtype != np.uint8 or data.shape != (n_bytes,):
        raise ValueError(f"{codec} decodes uint8 [{n_bytes}], got {data.dtype} {list(data.shape)}")
    return np.ascontiguousarray(data)


def require(ok: NDArray[np.bool_], what: str, plane: Plane, codec: str, *, head_axis: int = 0) -> None:
    """Raise CodecRangeError naming codec, role and head where any element of `ok` is false."""
    if not ok.all():
        axes = tuple(i for i in range(ok.ndim) if i != head_axis)
        head = int(np.argmin(ok.all(axis=axes)))
        raise CodecRangeError(f"{codec} cannot hold the {plane.role} of head {plane.first_head + head}: {what}")


def as_float16(x: F32) -> F16:
    """x rounded to nearest even; beyond the range, infinity."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def float16_up(x: F32) -> F16:
    """The smallest float16 >= x, for x >= 0 (infinity where there is none)."""
    y = as_float16(x)
    with np.errstate(over="ignore"):
        return np.where(y.astype(np.float32) < x, np.nextafter(y, np.float16(np.inf)), y)


def float16_down(x: F32) -> F16:
    """The largest float16 <= x (infinite where there is none)."""
    y = as_float16(x)
    with np.errstate(over="ignore"):
        return np.where(y.astype(np.float32) > x, np.nextafter(y, np.float16(-np.inf)), y)


def check_scales(scale: F16, plane: Plane, codec: str) -> F32:
    """Scales read from a page, as float32. A zero, negative, infinite or NaN one raises CodecRangeError: it
    never means 1."""
    value = scale.astype(np.float32)
    require(np.isfinite(value) & (value > 0), "a stored scale is not a positive number", plane, codec)
    return value
