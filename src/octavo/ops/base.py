"""The contract of a backend: a few coarse operations over rows of hidden states and pages of the arena.

A model file says which blocks with which dimensions and weights; a backend says how they are computed. The rules that
every backend keeps, because a cache hit must never change an answer:

- One arithmetic per row. The result for a row depends on that row and on the cache entries it reads; never on how many
  rows the call has, which rows they are, or how many threads run.
- The visibility rule. A query at position t reads every page before its own in sealed form and the tokens of its own
  page exactly. `attention_block` therefore seals each page that its rows complete, in this layer, before attending.
- Attention reduces fixed splits of SPLIT_PAGES pages counted from position 0, each from a fresh (max, sum,
  accumulator), merged from left to right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.cache.format import PageFormat
from octavo.cache.store import PageStore
from octavo.models.spec import AttentionWeights, MlpWeights, ModelSpec, Tensor

#: Pages per attention split. Part of the arithmetic, so part of the numeric fingerprint.
SPLIT_PAGES = 8

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows and the pages they touch, as flat arrays. A segment is a run of consecutive tokens of a sequence.

    Attributes:
        memory: uint8 [arena bytes], the arena; offsets below are byte offsets into it.
        tokens: int32 [n], token ids of all rows, segment after segment.
        row_start: int32 [s + 1], rows of segment i are row_start[i] .. row_start[i + 1].
        position: int32 [s], position in its sequence of the segment's first row.
        entry_start: int32 [s + 1], entries of segment i in the two arrays below.
        page_offset: int64 [e], sealed pages. Entry j of a segment holds positions j * page_size onwards. Listed are
            all pages that are full once the step is done: those sealed before, and those this step seals (whose
            offset is where to write).
        page_format: uint8 [e], format id of each entry, as `add_format` returned it.
        open_offset: int64 [s], the sequence's open page in the open format; -1 where the segment starts and ends on
            a page edge. It holds the tokens before `position` in the segment's first page; after the call it holds
            those of the last, unfinished page. Bytes of unused slots are arbitrary.
    """

    memory: U8
    tokens: I32
    row_start: I32
    position: I32
    entry_start: I32
    page_offset: I64
    page_format: U8
    open_offset: I64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of m rows are chosen, as flat arrays.

    The filters narrow the tokens down one after the other: top_k; then top_p, on the distribution that top_k left;
    then min_p. At least one token stays, and of equal logits those with lower ids count as likelier. The kept tokens,
    in the order of their ids, divide 0 .. 1 in proportion to exp(logit / temperature); the one that `uniform` falls
    upon is drawn.

    Attributes:
        temperature: float64 [m]; 0 takes the largest logit and reads nothing below.
        top_k: int32 [m], the k largest logits; 0 is all.
        top_p: float64 [m] in (0, 1], the fewest likely tokens whose probability reaches top_p.
        min_p: float64 [m] in [0, 1], logits of at least max + temperature * ln(min_p).
        uniform: float64 [m] in [0, 1), a random number for each row.
    """

    temperature: F64
    top_k: I32
    top_p: F64
    min_p: F64
    uniform: F64


class Ops(Protocol):
    """A backend. `prepare_*` run once at load and return opaque handles; the rest runs every step.

    Hidden states are float32 [n, d_model]; blocks add their output to `hidden` in place (the residual).
    Weights of adapters and a communicator for tensor parallelism will be arguments of the two blocks.
    """

    name: str
    #: Instruction-set path and kernel revision, as in "avx2/1": part of the numeric fingerprint.
    arithmetic: str

    def prepare_embedding(self, weight: Tensor) -> Any: ...

    def prepare_attention(self, spec: ModelSpec, layer: int, weights: AttentionWeights, page_size: int) -> Any: ...

    def prepare_mlp(self, spec: ModelSpec, weights: MlpWeights) -> Any: ...

    def prepare_head(self, spec: ModelSpec, norm: F32, weight: Tensor) -> Any: ...

    def add_format(self, fmt: PageFormat) -> int:
        """Register a sealed form; returns its id for Batch.page_format."""
        ...

    def new_store(self, n_bytes: int) -> PageStore:
        """Memory for pages, which this backend's kernels read and write."""
        ...

    def embed(self, embedding: Any, tokens: I32) -> F32:
        """-> float32 [n, d_model], a buffer that is the caller's until the next embed."""
        ...

    def attention_block(self, block: Any, hidden: F32, batch: Batch) -> None:
        """hidden += W_o attention(rope(W_qkv norm(hidden))), writing keys and values to the batch's pages.

        Raises CodecRangeError when a page cannot be sealed; the step must then be abandoned.
        """
        ...

    def mlp_block(self, block: Any, hidden: F32) -> None:
        """hidden += W_down(silu(W_gate x) * W_up x), x = norm(hidden)."""
        ...

    def head(self, head: Any, hidden: F32, rows: Sequence[int] | I32) -> F32:
        """Logits of the given rows: float32 [len(rows), vocab_size]; the caller's until the next head."""
        ...

    def log_softmax(self, logits: F32) -> F32:
        """float32 [m, vocab] -> float32 [m, vocab]; same arithmetic for every m."""
        ...

    def sample(self, logits: F32, sampling: Sampling) -> I32:
        """float32 [m, vocab] -> int32 [m], a token for each row; -1 for a row with a NaN or +inf, or of -inf alone."""
        ...

    def forget(self) -> None:
        """Let go of the last batch, and with it of the arena. Not while a block runs; another batch may follow."""
        ...
