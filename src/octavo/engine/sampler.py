"""From logits to tokens: what a choice keeps between its tokens, and a step's rows drawn in one operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.messages import SamplingParams, TokenLogprob
from octavo.errors import OctavoError
from octavo.ops.base import Ops, Sampling

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draw:
    """A token to draw.

    Attributes:
        row: of the step's logits; the choices of a request read one row at first.
        adjusted: float32 [vocab], the row after penalties and bias; None where there are none.
        uniform: the random number, in [0, 1).
    """

    row: int
    adjusted: F32 | None
    params: SamplingParams
    uniform: float


class Sampler:
    """One choice's parameters, seed, and the tokens that its penalties count.

    The random number for the token at a position is a function of (seed, choice, position) alone: Philox, a
    counter-based generator (Salmon et al., 2011). A preempted and resumed sequence therefore draws the same numbers.
    """

    def __init__(self, params: SamplingParams, seed: int, index: int, prompt: Sequence[int]) -> None:
        self._params = params
        self.seed = seed
        self._key = (seed & (2**64 - 1)) | (index << 64)
        self._repeats = params.repetition_penalty != 1.0
        self._seen = np.unique(np.asarray(prompt, dtype=np.int64)) if self._repeats else np.empty(0, dtype=np.int64)
        self._counts: Counter[int] = Counter()
        self._biased = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._counting = bool(params.presence_penalty or params.frequency_penalty)

    def draw(self, logits: F32, row: int, position: int) -> Draw:
        """logits: float32 [m, vocab]. `position` is the new token's index in its sequence."""
        adjusts = self._repeats or self._counting or len(self._biased)
        adjusted = self._adjusted(logits[row]) if adjusts else None
        uniform = 0.0 if self._params.temperature == 0 else self._uniform(position)
        return Draw(row, adjusted, self._params, uniform)

    def accept(self, token: int) -> None:
        """Count what was drawn. Raises OctavoError for -1, which no finite logits give."""
        if token < 0:
            raise OctavoError("the model's logits are not finite numbers; its weights may be damaged")
        if self._repeats and token not in self._counts and not (self._seen == token).any():
            self._seen = np.append(self._seen, token)
        if self._repeats or self._counting:
            self._counts[token] += 1

    def _adjusted(self, logits: F32) -> F32:
        p = self._params
        row = logits.copy()
        if self._repeats:
            seen = row[self._seen]
            row[self._seen] = np.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        if self._counting and self._counts:
            generated = np.fromiter(self._counts, dtype=np.int64, count=len(self._counts))
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
            row[generated] -= np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * counts
        row[self._biased] += self._bias
        return row

    def _uniform(self, position: int) -> float:
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=position))
        return float(generator.random())


def sample(ops: Ops, logits: F32, draws: Sequence[Draw]) -> list[int]:
    """logits: float32 [m, vocab], as `Sampler.draw` was given -> a token for each draw; -1 where not finite."""
    if not draws:
        return []
    rows = logits
    if any(d.adjusted is not None for d in draws) or [d.row for d in draws] != list(range(len(logits))):
        rows = np.stack([logits[d.row] if d.adjusted is None else d.adjusted for d in draws])
    params = [d.params for d in draws]
    sampling = Sampling(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_k=np.array([min(p.top_k, logits.shape[1]) for p in params], dtype=np.int32),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        uniform=np.array([d.uniform for d in draws], dtype=np.float64),
    )
    tokens: list[int] = ops.sample(rows, sampling).tolist()
    return tokens


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
