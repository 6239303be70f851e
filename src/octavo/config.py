"""Frozen configurations, validated once at the edge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from octavo.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip

PAGE_SIZES = (16, 32, 64, 128)
MAX_THREADS = 512

Backend = Literal["cpu", "reference"]
Isa = Literal["auto", "portable", "avx2", "avx512"]


def parse_bytes(text: str | int) -> int:
    """ "64MiB", "2GiB", "1.5GB" or a plain number of bytes -> bytes, at least 1. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text if isinstance(text, str) else f"{text!r}")
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"not a size: {text!r}; write a number with B, KiB, MiB, GiB, kB, MB or GB, such as 512MiB")
    n_bytes = int(float(match.group(1)) * unit)
    if not 1 <= n_bytes < 1 << 62:
        raise ConfigError(f"a size of {text} is {'nothing' if n_bytes < 1 else 'beyond any memory'}")
    return n_bytes


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How the cache may treat this model's pages.

    Attributes:
        key_codec, value_codec: how sealed pages are written (see octavo.codecs).
        prefix_cache: whether finished pages may be found by later requests.
        ttl_s: seconds that a page lives after its last hit. max_age_s: and in all, hits or not. None: no limit.
    """

    key_codec: str = "int8"
    value_codec: str = "int8"
    prefix_cache: bool = True
    ttl_s: float | None = None
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttl_s", "max_age_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")
        if self.ttl_s is not None and self.max_age_s is not None and self.ttl_s > self.max_age_s:
            raise ConfigError(
                f"ttl_s {self.ttl_s:g} is more than max_age_s {self.max_age_s:g}, which would never be met"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        backend: "cpu" (C++ kernels) or "reference" (float32 torch, slow, the oracle; needs the torch extra).
        threads: worker threads; 0 takes one per physical core.
        kv_memory_bytes: hard budget of the page arena; None takes a quarter of free memory, at most what
            max_num_seqs full contexts need.
        page_size: tokens per page.
        max_model_len: longest prompt plus output; 0 takes the model's context, or what the budget holds.
        max_num_seqs: sequences that run at once.
        step_tokens: tokens computed per step at most, decoded and prefilled together.
        max_queue: requests that may wait; one more is refused.
        isa: instruction-set path of the cpu backend; "auto" takes the best this machine has.
        profile: time the parts of every step (see octavo.ops.profile).
    """

    backend: Backend = "cpu"
    threads: int = 0
    kv_memory_bytes: int | None = None
    page_size: int = 32
    max_model_len: int = 0
    max_num_seqs: int = 16
    step_tokens: int = 512
    max_queue: int = 1024
    isa: Isa = "auto"
    profile: bool = False
    policy: CachePolicy = CachePolicy()

    def __post_init__(self) -> None:
        _check_choice("backend", self.backend, get_args(Backend))
        _check_choice("isa", self.isa, get_args(Isa))
        _check_choice("page_size", self.page_size, PAGE_SIZES)
        if not isinstance(self.policy, CachePolicy):
            raise ConfigError(f"policy must be a CachePolicy, got {self.policy!r}")
        for name, low, high in (
            ("threads", 0, MAX_THREADS),
            ("max_num_seqs", 1, 1 << 20),
            ("step_tokens", 1, 1 << 20),
            ("max_queue", 1, 1 << 20),
        ):
            _check_range(name, getattr(self, name), low, high)
        if self.max_model_len != 0:
            # One token of prompt, one of output.
            _check_range("max_model_len", self.max_model_len, 2, 1 << 31)
        if self.kv_memory_bytes is not None:
            _check_range("kv_memory_bytes", self.kv_memory_bytes, 1, 1 << 62)


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices or isinstance(value, bool):
        raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be from {low} to {high}, got {value}")
