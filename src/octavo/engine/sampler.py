"""From logits to a token. Pure functions of one row, so that batch mates cannot change a choice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.messages import SamplingParams, TokenLogprob
from octavo.errors import OctavoError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

#: Candidates looked at before a full sort is tried (top_p and min_p keep far fewer, as a rule).
_FIRST_CANDIDATES = 256


class Sampler:
    """Chooses one choice's tokens.

    The random number for the token at a position is a function of (seed, choice, position) alone: Philox, a
    counter-based generator (Salmon et al., 2011). A preempted and resumed sequence therefore draws the same numbers.
    """

    def __init__(self, params: SamplingParams, seed: int, index: int, prompt: Sequence[int]) -> None:
        self._params = params
        self.seed = seed
        self._key = (seed & (2**64 - 1)) | (index << 64)
        self._seen = np.unique(np.asarray(prompt, dtype=np.int64)) if params.repetition_penalty != 1.0 else None
        self._counts: Counter[int] = Counter()
        self._adjusts = bool(
            params.logit_bias or params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )

    def choose(self, logits: F32, position: int) -> int:
        """logits: float32 [vocab] -> token id. `position` is the new token's index in its sequence."""
        row = self._adjusted(logits) if self._adjusts else logits
        best = int(row.argmax())  # of a NaN, where there is one
        if not math.isfinite(row[best]):
            raise OctavoError("the model's logits are not finite numbers; its weights may be damaged")
        token = best if self._params.temperature == 0 else self._draw(row, np.float64(row[best]), position)
        if self._adjusts:
            self._counts[token] += 1
        return token

    def _adjusted(self, logits: F32) -> F32:
        p = self._params
        row = logits.copy()
        generated = np.fromiter(self._counts, dtype=np.int64, count=len(self._counts))
        if self._seen is not None:
            ids = np.union1d(self._seen, generated)
            row[ids] = np.where(row[ids] > 0, row[ids] / p.repetition_penalty, row[ids] * p.repetition_penalty)
        if len(generated) and (p.presence_penalty or p.frequency_penalty):
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
            row[generated] -= np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * counts
        for token, bias in p.logit_bias.items():
            row[token] += np.float32(bias)
        return row

    def _draw(self, row: F32, top: np.float64, position: int) -> int:
        """top: the largest of the row."""
        p = self._params
        bound, size, total = len(row), len(row), None
        if p.top_k:
            bound = size = min(p.top_k, len(row))
        elif p.top_p < 1.0 or p.min_p > 0.0:
            # Both filters keep a run of most likely tokens, so it is enough to sort until the run's end is in sight.
            size = min(_FIRST_CANDIDATES, bound)
            total = float(np.exp((row.astype(np.float64) - top) / p.temperature).sum())
        while True:
            ids = largest(row, size)
            weights = np.exp((row[ids].astype(np.float64) - top) / p.temperature)
            keep = self._kept(weights, float(weights.sum()) if total is None else total, complete=size == bound)
            if keep is not None:
                break
            size = min(size * 8, bound)
        cumulative = np.cumsum(weights[:keep])
        return int(ids[np.searchsorted(cumulative, self._uniform(position) * cumulative[-1], side="right")])

    def _kept(self, weights: F64, total: float, *, complete: bool) -> int | None:
        """How many of the sorted candidates survive top_p and min_p; None if more candidates must be seen."""
        p = self._params
        keep = len(weights)
        if p.top_p < 1.0:
            # top_p applies to the distribution after top_k.
            reached = np.nonzero(np.cumsum(weights) >= p.top_p * total)[0]
            if len(reached):
                keep = int(reached[0]) + 1
            elif not complete:
                return None
        if p.min_p > 0.0:
            above = int(np.count_nonzero(weights >= p.min_p * weights[0]))
            if above == len(weights) and keep == len(weights) and not complete:
                return None
            keep = min(keep, above)
        return max(keep, 1)

    def _uniform(self, position: int) -> float:
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=position))
        return float(generator.random())


def largest(row: F32, k: int) -> NDArray[np.int64]:
    """Indices of the k largest entries, largest first, ties by index."""
    if k < len(row):
        threshold = np.partition(row, len(row) - k)[len(row) - k]
        above = np.nonzero(row > threshold)[0]
        equal = np.nonzero(row == threshold)[0][: k - len(above)]
        candidates = np.concatenate([above, equal])
        candidates.sort()
    else:
        candidates = np.arange(len(row))
    return candidates[np.argsort(-row[candidates], kind="stable")]


def token_logprob(logprobs: F32, token: int, n_top: int) -> TokenLogprob:
    """logprobs: float32 [vocab], the model's log-probabilities."""
    top = largest(logprobs, min(n_top, len(logprobs))) if n_top else ()
    return TokenLogprob(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in top))
