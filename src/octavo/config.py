"""Frozen configurations, validated once at the edge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from octavo.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip

PAGE_SIZES = (16, 32, 64, 128)


def parse_bytes(text: str | int) -> int:
    """ "64MiB", "2GiB", "1.5GB" or a plain number of bytes -> bytes. Raises ConfigError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"not a size: {text!r}; write a number with B, KiB, MiB, GiB, kB, MB or GB, such as 512MiB")
    return int(float(match.group(1)) * unit)


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How the cache may treat this model's pages.

    Attributes:
        key_codec, value_codec: how sealed pages are written (see octavo.codecs).
        prefix_cache: whether finished pages may be found by later requests.
    """

    key_codec: str = "int8"
    value_codec: str = "int8"
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        backend: "cpu" (C++ kernels) or "reference" (float32 torch, slow, the oracle; needs the torch extra).
        threads: worker threads; 0 takes one per physical core.
        kv_memory_bytes: hard budget of the page arena; 0 takes a quarter of free memory, at most what
            max_num_seqs full contexts need.
        page_size: tokens per page.
        max_model_len: longest prompt plus output; 0 takes the model's context, or what the budget holds.
        max_num_seqs: sequences that run at once.
        step_tokens: tokens computed per step at most, decoded and prefilled together.
        max_queue: requests that may wait; one more is refused.
        isa: instruction-set path of the cpu backend; "auto" takes the best this machine has.
    """

    backend: Literal["cpu", "reference"] = "cpu"
    threads: int = 0
    kv_memory_bytes: int = 0
    page_size: int = 32
    max_model_len: int = 0
    max_num_seqs: int = 16
    step_tokens: int = 512
    max_queue: int = 1024
    isa: Literal["auto", "portable", "avx2", "avx512"] = "auto"
    policy: CachePolicy = CachePolicy()

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page size must be one of {', '.join(map(str, PAGE_SIZES))}, got {self.page_size}")
        for name, low in (("threads", 0), ("kv_memory_bytes", 0), ("max_model_len", 0),
                          ("max_num_seqs", 1), ("step_tokens", 1), ("max_queue", 1)):  # fmt: skip
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
