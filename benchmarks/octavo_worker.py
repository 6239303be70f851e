"""Octavo behind the worker protocol, through its public Python interface."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.engine_time import EngineClock
from benchmarks.protocol import serve
from octavo import LLM, SamplingParams, __version__
from octavo.config import CachePolicy
from octavo.engine.messages import Delta, Event, Failed, Finished, GenerateRequest, PromptProgress
from octavo.engine.prompt import prompt_array

#: Prompt tokens per step: llama.cpp's default batch.
CHUNK = 512
MAX_NUM_SEQS = 16


class OctavoWorker:
    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._salt = ""

    def load(self, model: str, cache: str, threads: int, n_ctx: int, backend: str = "cpu") -> Mapping[str, Any]:
        """`cache` is a codec, or one for keys and one for values: "int8/int4"."""
        key_codec, _, value_codec = cache.partition("/")
        self._llm = LLM(
            model,
            kv_memory="2GiB",
            policy=CachePolicy(key_codec=key_codec, value_codec=value_codec or key_codec),
            backend=backend,
            threads=threads,
            max_model_len=n_ctx,
            max_num_seqs=MAX_NUM_SEQS,
            step_tokens=CHUNK,
        )
        info = self._llm.engine.info
        return {
            "version": f"octavo {__version__}",
            "system": info.backend,
            "n_ctx": info.max_model_len,
            "bytes_per_token": info.bytes_per_token,
        }

    def close(self) -> None:
        self._llm.close()

    def tokenize(self, text: str) -> Mapping[str, Any]:
        return {"tokens": self._llm.tokenizer.encode(text, add_special=False)}

    def prefill(self, tokens: list[int], marks: list[int]) -> Mapping[str, Any]:
        """Without a prefix hit; seconds from submission until each of `marks` tokens is in the cache. The last mark,
        which must be len(tokens), includes the choice of the next token."""
        # Pages are shared within a cache_salt only.
        self._tokens, self._salt = tokens, uuid.uuid4().hex
        wanted, seconds = set(marks), {}
        start = time.perf_counter()
        for event in self._llm.stream(tokens, _greedy(1), cache_salt=self._salt):
            now = time.perf_counter() - start
            if isinstance(event, PromptProgress) and event.done_tokens in wanted and event.done_tokens < len(tokens):
                seconds[str(event.done_tokens)] = now
            elif isinstance(event, Delta):
                seconds[str(len(tokens))] = now
        if missed := wanted - {int(mark) for mark in seconds}:
            raise ValueError(f"no step of {CHUNK} tokens ends at {sorted(missed)}")
        return {"seconds": seconds}

    def decode(self, context: int, n: int, temperature: float = 0.0, top_p: float = 1.0) -> Mapping[str, Any]:
        """Generate n tokens after the first `context` tokens of the last prefill, which are found in the prefix cache;
        greedily at temperature 0. A token's time is that between its event and the one before; the first token's is
        not counted."""
        if context > len(self._tokens):
            raise ValueError(f"the last prompt had {len(self._tokens)} tokens, {context} were asked for")
        times, generated = [], []
        params = replace(_greedy(n + 1), temperature=temperature, top_p=top_p, seed=0)
        for event in self._llm.stream(self._tokens[:context], params, cache_salt=self._salt):
            if isinstance(event, Delta):
                times.append(time.perf_counter())
                generated.extend(event.token_ids)
        if len(generated) != n + 1 or len(times) != n + 1:
            raise RuntimeError(f"{len(generated)} tokens in {len(times)} events, expected {n + 1} in as many")
        return {"seconds": [b - a for a, b in pairwise(times)], "tokens": generated}

    def decode_clock(self, context: int, n: int) -> Mapping[str, Any]:
        """As `decode`, with the time inside kernels taken apart from that of whole steps."""
        with EngineClock(self._llm.engine) as clock:
            self.decode(context, n)
        # The first steps compute the prompt's tail; decoding steps are the last n.
        return {"steps": [list(step) for step in clock.steps[-n:]]}

    def together(self, prefix: list[int], tails: list[list[int]], n: int, warm: bool) -> Mapping[str, Any]:
        """Requests that arrive at once: prefix and a tail each, n tokens. Per request, seconds from the arrival of all
        until each of its tokens."""
        cache_salt = uuid.uuid4().hex
        if warm:
            self._llm.generate([*prefix, 5], _greedy(1), cache_salt=cache_salt)
        times: list[list[float]] = [[] for _ in tails]
        failed: list[Exception] = []
        done = threading.Semaphore(0)

        def sink(index: int, event: Event) -> None:
            if isinstance(event, Delta):
                times[index].extend([time.perf_counter() - start] * len(event.token_ids))
            elif isinstance(event, Failed):
                failed.append(event.error)
            if isinstance(event, Finished | Failed):
                done.release()

        start = time.perf_counter()
        for i, tail in enumerate(tails):
            request = GenerateRequest(uuid.uuid4().hex, prompt_array([*prefix, *tail]), _greedy(n), cache_salt)
            self._llm.engine.submit(request, partial(sink, i))
        for _ in tails:
            done.acquire()
        if failed:
            raise failed[0]
        return {"times": times}

    def read(self, tokens: list[int]) -> Mapping[str, Any]:
        """Read a prompt of whole pages; what the cache holds afterwards."""
        self._llm.generate(tokens, SamplingParams(max_tokens=0))
        # Answered between steps, so the counts that follow are those after the request.
        self._llm.engine.page_map()
        stats = self._llm.stats()
        return {
            "sealed_pages": stats.pages_active(is_open=False) + stats.pages_cached,
            "used_bytes": stats.kv_used_bytes,
        }

    def nll(self, tokens: list[int]) -> Mapping[str, Any]:
        """-log p of tokens[1:], each given all before it."""
        output = self._llm.generate(
            tokens, SamplingParams(max_tokens=0, prompt_logprobs=0), cache_salt=uuid.uuid4().hex
        )
        return {"nll": [-entry.logprob for entry in output.prompt_logprobs[1:]]}

    def greedy(self, tokens: list[int], n: int) -> Mapping[str, Any]:
        """n greedy tokens after `tokens`."""
        return {"tokens": self._llm.generate(tokens, _greedy(n)).outputs[0].token_ids}


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


if __name__ == "__main__":
    worker = OctavoWorker()
    serve({
        "load": worker.load, "tokenize": worker.tokenize, "prefill": worker.prefill, "decode": worker.decode,
        "decode_clock": worker.decode_clock, "read": worker.read, "nll": worker.nll, "greedy": worker.greedy,
        "together": worker.together,
    })  # fmt: skip
    worker.close()
