"""OpenVINO GenAI behind the worker protocol, through its continuous-batching pipeline with prefix caching on.

The pipeline loads the same GGUF file and is given token ids. Imports nothing of Octavo.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.protocol import serve

#: Prompt tokens per step, as on the other sides.
CHUNK = 512
CACHE_GIB = 3


class OpenVinoWorker:
    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ids = itertools.count()

    def load(self, model: str, cache: str, threads: int, n_ctx: int) -> Mapping[str, Any]:
        """`cache` is a precision, or one for keys and one for values: "u8/u4"."""
        keys, _, values = cache.partition("/")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = CHUNK
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if values:
            properties |= {"KEY_CACHE_PRECISION": keys, "VALUE_CACHE_PRECISION": values}
        else:
            properties |= {"KV_CACHE_PRECISION": keys}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        return {"version": f"openvino-genai {genai.__version__}", "system": openvino.get_version(), "n_ctx": n_ctx}

    def prefill(self, tokens: list[int], marks: list[int]) -> Mapping[str, Any]:
        """Without a prefix hit, which a first token of its own prevents; seconds until each of `marks` tokens is in the
        cache. The last mark, which must be len(tokens), includes the choice of the next token."""
        # The text's tokens stay for `decode`, which finds those of the last prefill.
        self._tokens = [1000 + next(self._ids), *tokens[1:]]
        handle = self._add(self._tokens, 1)
        wanted, seconds, done = set(marks), {}, 0
        start = time.perf_counter()
        while not handle.can_read():
            self._pipeline.step()
            done = min(done + CHUNK, len(tokens))
            if done in wanted and done < len(tokens):
                seconds[str(done)] = time.perf_counter() - start
        seconds[str(len(tokens))] = time.perf_counter() - start
        self._finish([handle])
        return {"seconds": seconds}

    def decode(self, context: int, n: int, temperature: float = 0.0, top_p: float = 1.0) -> Mapping[str, Any]:
        """Generate n tokens after the first `context` tokens of the last prefill, which are found in the prefix cache;
        greedily at temperature 0. A token's time is that between its step's end and the one before."""
        handle = self._add(self._tokens[:context], n + 1, temperature, top_p)
        times: list[float] = []
        generated: list[int] = []
        while len(generated) < n + 1:
            self._pipeline.step()
            new = _read(handle)
            times.extend([time.perf_counter()] * len(new))
            generated.extend(new)
        self._finish([handle])
        return {"seconds": [b - a for a, b in pairwise(times)], "tokens": generated}

    def together(self, prefix: list[int], tails: list[list[int]], n: int, warm: bool) -> Mapping[str, Any]:
        """Requests that arrive at once: prefix and a tail each, n tokens. Per request, seconds from the arrival of all
        until each of its tokens."""
        if warm:
            handle = self._add([*prefix, 5], 1)
            while not handle.can_read():
                self._pipeline.step()
            self._finish([handle])
        start = time.perf_counter()
        handles = [self._add(prefix + tail, n) for tail in tails]
        times: list[list[float]] = [[] for _ in tails]
        while any(len(t) < n for t in times):
            self._pipeline.step()
            now = time.perf_counter() - start
            for handle, mine in zip(handles, times, strict=True):
                mine.extend([now] * len(_read(handle)))
        self._finish(handles)
        return {"times": times}

    def _add(self, tokens: list[int], n: int, temperature: float = 0.0, top_p: float = 1.0) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = temperature, top_p
        return self._pipeline.add_request(next(self._ids), openvino.Tensor(np.array([tokens], np.int64)), config)

    def _finish(self, handles: list[Any]) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        for handle in handles:
            _read(handle)


def _read(handle: Any) -> list[int]:
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens.extend(output.generated_ids)
    return tokens


if __name__ == "__main__":
    worker = OpenVinoWorker()
    serve({"load": worker.load, "prefill": worker.prefill, "decode": worker.decode, "together": worker.together})
