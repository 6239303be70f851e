"""The contract of a backend: a few coarse operations over rows of hidden states and pages of the arena.

A model file says which blocks with which dimensions and weights; a backend says how they are computed. The rules that
every backend keeps, because a cache hit must never change an answer:

- One arithmetic per row. The result for a row depends on that row and on the cache entries it reads; never on how many
  rows the call has, which rows they are, or how many threads run.
- The visibility rule. A query at position t reads every page before its own in sealed form and the tokens of its own
  page exactly. `attention_block` therefore seals each page that its rows complete, in this layer, before attending.
- Attention reads a list of entries (`GroupEntries`) in splits, each from a fresh (max, sum, accumulator), merged from
  left to right. A split is a maximal run of consecutive entries whose position // (SPLIT_PAGES * page_size) is the
  same, of at most SPLIT_PAGES entries; the query's own page joins the last run if it lies in the same span and the run
  has fewer than SPLIT_PAGES entries, else it is a split of its own. So the splits of a sequence with all its pages are
  SPLIT_PAGES pages each, counted from position 0.
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
class GroupEntries:
    """The pages of one cache group that a step touches, as flat arrays: s segments, l lists, e entries.

    An entry is a sealed page, and says which tokens it holds. A list is what a head reads. Its rules; who breaks one
    gets a ValueError that names the segment, the list and the entry:

    - Entries are in order, position[j] + n_tokens[j] <= position[j + 1]. Any may be missing. An entry's tokens may have
      gaps between them: they lie in order at position[j] or behind it, and before position[j + 1].
    - A page that the segment completes in this step has an entry in each of the segment's lists, with its page's start
      as position and n_tokens == page_size. `page_offset` is then where the step seals it; lists may name different
      pages.
    - Every other entry lies wholly before the segment's first own page (the page of its first row): position +
      n_tokens <= that page's start.

    - No byte is written twice, or both written and read: pages that a step completes and open pages are one segment's
      alone (whose lists may name one page that is completed for several heads).

    A query in own page p reads the entries with position < p * page_size, then its own page exactly.

    Attributes:
        first_list: int32 [s + 1], lists of segment i are first_list[i] .. first_list[i + 1]: one, read by every layer
            and KV head of the group; or one for each, layer by layer and within a layer head by head.
        entry_start: int32 [l + 1], entries of each list in the four arrays below.
        page_offset: int64 [e], byte offset of the page.
        page_format: uint8 [e], format id, as `add_format` returned it for this group.
        position: int32 [e], true position of the entry's first token.
        n_tokens: int32 [e], 1 .. page_size: slots 0 .. n_tokens - 1 hold tokens. All else in the page is arbitrary:
            other slots' keys, values and scales of values, and what belongs to heads and layers that do not read it.
        open_offset: int64 [s], the sequence's open page in the open format; -1 where the segment starts and ends on
            a page edge. It holds the tokens before `Batch.position` in the segment's first page; after the call it
            holds those of the last, unfinished page. Bytes of unused slots are arbitrary.
    """

    first_list: I32
    entry_start: I32
    page_offset: I64
    page_format: U8
    position: I32
    n_tokens: I32
    open_offset: I64

    def entries_of(self, segment: int, layer: int, head: int, n_kv_heads: int) -> range:
        """The entries that a KV head of the group's layer-th layer reads."""
        first, n = int(self.first_list[segment]), int(self.first_list[segment + 1] - self.first_list[segment])
        at = first if n == 1 else first + layer * n_kv_heads + head
        return range(int(self.entry_start[at]), int(self.entry_start[at + 1]))


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows and the pages they touch, as flat arrays. A segment is a run of consecutive tokens of a sequence.

    Attributes:
        store: the arena's bytes, as `new_store` made them; offsets are from its start.
        tokens: int32 [n], token ids of all rows, segment after segment.
        row_start: int32 [s + 1], rows of segment i are row_start[i] .. row_start[i + 1].
        position: int32 [s], position in its sequence of the segment's first row.
        groups: the pages of each cache group, in the order of `ModelSpec.cache_spec().groups`.
    """

    store: PageStore
    tokens: I32
    row_start: I32
    position: I32
    groups: tuple[GroupEntries, ...]


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

    @property
    def cascade_refused(self) -> int:
        """Tiles of rows, over all steps, that could have shared the reading of pages with others but were run alone,
        since the partial results of all would have taken too much memory. Their results are the same."""
        ...

    def prepare_embedding(self, weight: Tensor) -> Any: ...

    def prepare_attention(self, spec: ModelSpec, layer: int, weights: AttentionWeights, page_size: int) -> Any: ...

    def prepare_mlp(self, spec: ModelSpec, weights: MlpWeights) -> Any: ...

    def prepare_head(self, spec: ModelSpec, norm: F32, weight: Tensor) -> Any: ...

    def add_format(self, group: int, fmt: PageFormat) -> int:
        """Register a sealed form of a cache group; returns its id for GroupEntries.page_format. Ids count per group."""
        ...

    def new_store(self, n_bytes: int) -> PageStore:
        """Memory for pages, which this backend's kernels read and write."""
        ...

    def embed(self, embedding: Any, tokens: I32) -> F32:
        """-> float32 [n, d_model], a buffer that is the caller's until the next embed."""
        ...

    def attention_block(self, block: Any, hidden: F32, batch: Batch) -> None:
        """hidden += W_o attention(rope(W_qkv norm(hidden))), writing keys and values to the batch's pages.

        Raises CodecRangeError when a page cannot be sealed or read; the step must then be abandoned. Open pages hold
        the tokens before the step's rows as they did before it, in all layers of all groups, so that any of its
        segments can be run again from the same position. Pages that the step was to seal are undefined.
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
