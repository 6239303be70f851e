"""Kullback-Leibler divergence of one model's predictions under several cache codecs, from whole rows of logits.

One model, several caches: each chunk of a text goes through the same decoder once per codec, and the rows are compared
before the next chunk, so that no row of vocabulary-many floats is ever kept. This drives the engine's runner directly;
the results are those of the public interface, to the bit, and `benchmarks.perplexity` checks that they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from octavo.cache.footprint import plan
from octavo.cache.format import Form
from octavo.cache.manager import KVCache
from octavo.cache.radix import PrefixIdentity
from octavo.cache.table import BlockTable
from octavo.config import EngineConfig
from octavo.engine.build import make_ops
from octavo.engine.decoder import Decoder
from octavo.engine.request import Sequence, TokenBuffer
from octavo.engine.runner import PROMPT_LOGIT_ROWS, Runner, StepHidden
from octavo.engine.scheduler import ScheduledSequence
from octavo.models.loading.load import load_model
from octavo.ops.base import Ops

F32 = NDArray[np.float32]


@dataclass
class Divergence:
    """Against the first codec, over all scored positions.

    Attributes:
        kl: mean of sum p (log p - log q), nats, p being the first codec's prediction.
        same_top: share of positions where the likeliest token is the same.
        nll: per window, -log p of each scored token, nats.
    """

    kl: float = 0.0
    same_top: float = 0.0
    nll: list[list[float]] = field(default_factory=list)


@dataclass
class _Text:
    """What the runner reads of a sequence."""

    table: BlockTable
    tokens: TokenBuffer


class _Reader:
    """One codec's cache, fed a text chunk by chunk."""

    def __init__(self, decoder: Decoder, ops: Ops, page_size: int, codec: str, max_tokens: int) -> None:
        keys, _, values = codec.partition("/")
        spec = decoder.spec.cache_spec()
        form = Form(keys, values or keys)
        footprint = plan(spec, page_size, [form], 1 << 40)
        frames = footprint.frames_for([max_tokens]) + 1
        footprint = plan(spec, page_size, [form], frames * footprint.frame_bytes)
        self._cache = KVCache(footprint, ops.new_store(footprint.arena_bytes), prefix_cache=False)
        self._identity = PrefixIdentity((), "", form.name, "all", "", "")
        self._runner = Runner(decoder, ops, self._cache)
        self._text: _Text | None = None

    def start(self, tokens: list[int]) -> None:
        if self._text is not None:
            self._cache.release(self._text.table)
        self._text = _Text(self._cache.new_table(self._identity), TokenBuffer(np.asarray(tokens, dtype=np.int32)))

    def read(self, n: int) -> StepHidden:
        """Hidden states of the next n tokens."""
        assert self._text is not None
        self._cache.reserve(self._text.table, n)
        result = self._runner.run([ScheduledSequence(cast(Sequence, self._text), n)])
        self._cache.commit(self._text.table, self._text.tokens.view(), n)
        # The backend reuses its buffer, and the next codec runs before these rows are read.
        return StepHidden(result.hidden.copy(), result.row_start)

    def logits(self, result: StepHidden, row: int, n: int) -> F32:
        return self._runner.logits(result, row, n)


def measure(
    model: str, codecs: list[str], windows: list[list[int]], first: int, config: EngineConfig
) -> dict[str, Divergence]:
    """Compare `codecs` with codecs[0] on the tokens `first` onwards of every window.

    A codec is a name, or two for keys and values: "int8/int4".
    """
    loaded = load_model(model)
    ops = make_ops(config)
    decoder = Decoder(loaded.spec, loaded.weights, ops, config.page_size)
    longest = max(len(w) for w in windows)
    readers = {codec: _Reader(decoder, ops, config.page_size, codec, longest) for codec in codecs}
    results = {codec: Divergence(nll=[[] for _ in windows]) for codec in codecs}
    n_scored = 0
    for index, tokens in enumerate(windows):
        targets = np.asarray(tokens[1:])
        for reader in readers.values():
            reader.start(tokens)
        for start in range(0, len(tokens), config.step_tokens):
            n = min(config.step_tokens, len(tokens) - start)
            hidden = {codec: reader.read(n) for codec, reader in readers.items()}
            # Row i predicts token i + 1.
            for row in range(max(start, first - 1), min(start + n, len(targets)), PROMPT_LOGIT_ROWS):
                rows = min(PROMPT_LOGIT_ROWS, start + n - row, len(targets) - row)
                expected = targets[row : row + rows]
                base: F32 | None = None
                for codec, reader in readers.items():
                    logprobs = ops.log_softmax(reader.logits(hidden[codec], row - start, rows))
                    base = logprobs if base is None else base
                    result = results[codec]
                    result.nll[index].extend((-logprobs[np.arange(rows), expected]).tolist())
                    result.kl += _kl(base, logprobs)
                    result.same_top += float((base.argmax(axis=1) == logprobs.argmax(axis=1)).sum())
                n_scored += rows
    for result in results.values():
        result.kl /= n_scored
        result.same_top /= n_scored
    return results


def _kl(p: F32, q: F32) -> float:
    """Sum over rows; p, q float32 [n, vocab], log-probabilities."""
    return float((np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64).sum())
