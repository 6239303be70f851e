"""Requests and their sequences, as the engine's thread sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from octavo.cache.receipt import Holdings, Miss
from octavo.cache.table import BlockTable
from octavo.engine.messages import FinishReason, GenerateRequest, TokenLogprob
from octavo.engine.outlet import Outlet
from octavo.engine.output import ChoiceText
from octavo.engine.prompt import I32
from octavo.engine.sampler import Sampler


class TokenBuffer:
    """A growing int32 array: prompt, then output."""

    def __init__(self, tokens: I32) -> None:
        self._data = np.empty(max(64, 2 * len(tokens)), dtype=np.int32)
        self._data[: len(tokens)] = tokens
        self._n = len(tokens)

    def __len__(self) -> int:
        return self._n

    def append(self, token: int) -> None:
        if self._n == len(self._data):
            self._data = np.concatenate([self._data, np.empty_like(self._data)])
        self._data[self._n] = token
        self._n += 1

    def view(self) -> I32:
        """int32 [len], valid until the next append."""
        return self._data[: self._n]


@dataclass(eq=False)
class Sequence:
    """One choice of a request.

    `table` is None while the sequence waits. All tokens but the newest have been, or are to be, computed before the
    next one can be sampled.
    """

    request: Request
    index: int
    tokens: TokenBuffer
    sampler: Sampler
    text: ChoiceText
    table: BlockTable | None = None
    n_generated: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_computed_tokens(self) -> int:
        return self.table.num_computed_tokens if self.table is not None else 0

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache yet. 1 for a sequence that decodes."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.n_generated > 0 and self.num_remaining_tokens == 1

    def max_total_tokens(self) -> int:
        """Tokens that may end up in the cache: the last generated one never does."""
        return max(self.request.n_prompt, self.request.n_prompt + self.request.max_tokens - 1)


@dataclass(eq=False)
class Request:
    """A request in the engine. Sequence 0 computes the prompt; the others are forked from it.

    Attributes:
        num_cached_tokens: prefix hit of its first admission; None before. miss: why that was no longer.
        holds_more: set by each step that computes for it, and cleared when holdings and peak are brought up to date.
        holdings: pages of its choices when one last ended. peak_kv_bytes: the most of these, in bytes.
        erased: its tenant's pages were erased while it was in flight: it publishes none.
        expires_at: when what it published expires, in the tree's clock; None without a lifetime.
        evicted_tokens: cached tokens that went to make room for it.
    """

    message: GenerateRequest
    sink: Outlet
    max_tokens: int
    eos_token_ids: frozenset[int]
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None
    miss: Miss | None = None
    evicted_tokens: int = 0
    erased: bool = False
    expires_at: float | None = None
    completion_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    holdings: Holdings = field(default_factory=Holdings)
    peak_kv_bytes: int = 0
    holds_more: bool = False

    @property
    def n_prompt(self) -> int:
        return len(self.message.prompt_token_ids)

    @cached_property
    def penalized_prompt_ids(self) -> list[int]:
        """The distinct ids of the prompt where repeating them is penalized, else none. Once for all choices: these are
        no more than the vocabulary, however long the prompt is."""
        if self.message.params.repetition_penalty == 1.0:
            return []
        ids: list[int] = np.unique(self.message.prompt_token_ids).tolist()
        return ids

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.message.params.prompt_logprobs is not None

    @property
    def is_finished(self) -> bool:
        return bool(self.sequences) and all(s.finish_reason is not None for s in self.sequences)
