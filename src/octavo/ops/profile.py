"""Where the time of steps goes: a backend that times another, and the sums.

Timing costs about a microsecond per block; nothing is computed differently.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.cache.format import PageFormat
from octavo.cache.store import PageStore
from octavo.models.spec import AttentionWeights, MlpWeights, ModelSpec, Tensor
from octavo.ops.base import F32, I32, Batch, Ops, Sampling

Kind = Literal["decode", "prefill"]

#: What is around the operations: scheduling, laying out the batch, emitting.
AROUND = "scheduling and output"


@dataclass(slots=True)
class Times:
    """Sums over the steps of a kind. A step counts as "prefill" where any sequence computes more than one token."""

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


class Profile:
    """Sums of steps. Written by the engine's thread; read when it has stopped, or roughly while it runs."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, Times] = {"decode": Times(), "prefill": Times()}
        self._parts: dict[str, float] = {}
        self._rows = 0
        self._kind: Kind = "decode"

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the engine, from scheduling to the last event."""
        self._parts, self._rows, self._kind = {}, 0, "decode"
        start = time.perf_counter()
        yield
        if not self._rows:
            return  # nothing was computed
        seconds = time.perf_counter() - start
        times = self.kinds[self._kind]
        times.steps += 1
        times.rows += self._rows
        times.seconds += seconds
        self._parts[AROUND] = seconds - sum(self._parts.values())
        for name, spent in self._parts.items():
            times.parts[name] = times.parts.get(name, 0.0) + spent

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - start

    def note(self, batch: Batch) -> None:
        """The batch of the step that runs."""
        if not self._rows:
            self._rows = len(batch.tokens)
            self._kind = "decode" if self._rows == len(batch.position) else "prefill"

    def lines(self) -> list[str]:
        """The table in words, a line per kind and part."""
        result = []
        for kind, times in self.kinds.items():
            if not times.steps:
                continue
            step_ms = 1e3 * times.seconds / times.steps
            result.append(f"{kind}: {times.steps:,} steps, {times.rows:,} tokens, {step_ms:.2f} ms a step")
            for name, spent in sorted(times.parts.items(), key=lambda item: -item[1]):
                part_ms = 1e3 * spent / times.steps
                result.append(f"  {name:24s} {part_ms:9.2f} ms  {spent / times.seconds:6.1%}")
        return result or ["no step has run"]


class ProfiledOps:
    """Times the blocks of a backend. Implements `Ops`."""

    def __init__(self, ops: Ops, profile: Profile) -> None:
        self._ops = ops
        self._profile = profile
        self.name = ops.name
        self.arithmetic = ops.arithmetic

    @property
    def cascade_refused(self) -> int:
        return self._ops.cascade_refused

    def prepare_embedding(self, weight: Tensor) -> Any:
        return self._ops.prepare_embedding(weight)

    def prepare_attention(self, spec: ModelSpec, layer: int, weights: AttentionWeights, page_size: int) -> Any:
        return self._ops.prepare_attention(spec, layer, weights, page_size)

    def prepare_mlp(self, spec: ModelSpec, weights: MlpWeights) -> Any:
        return self._ops.prepare_mlp(spec, weights)

    def prepare_head(self, spec: ModelSpec, norm: F32, weight: Tensor) -> Any:
        return self._ops.prepare_head(spec, norm, weight)

    def add_format(self, group: int, fmt: PageFormat) -> int:
        return self._ops.add_format(group, fmt)

    def new_store(self, n_bytes: int) -> PageStore:
        return self._ops.new_store(n_bytes)

    def embed(self, embedding: Any, tokens: I32) -> F32:
        with self._profile.part("embedding"):
            return self._ops.embed(embedding, tokens)

    def attention_block(self, block: Any, hidden: F32, batch: Batch) -> None:
        self._profile.note(batch)
        with self._profile.part("attention and QKV"):
            self._ops.attention_block(block, hidden, batch)

    def mlp_block(self, block: Any, hidden: F32) -> None:
        with self._profile.part("MLP"):
            self._ops.mlp_block(block, hidden)

    def head(self, head: Any, hidden: F32, rows: Sequence[int] | I32) -> F32:
        with self._profile.part("output head"):
            return self._ops.head(head, hidden, rows)

    def log_softmax(self, logits: F32) -> F32:
        with self._profile.part("log-softmax"):
            return self._ops.log_softmax(logits)

    def sample(self, logits: F32, sampling: Sampling) -> I32:
        with self._profile.part("sampling"):
            return self._ops.sample(logits, sampling)

    def forget(self) -> None:
        self._ops.forget()
