"""llama.cpp behind the worker protocol, through the C API that llama-cpp-python binds.

The high-level `Llama` class copies logits and keeps its own token history; calling the C API leaves only
`llama_decode` and one argmax in a decode step. Imports nothing of Octavo.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from benchmarks.protocol import serve

#: Tokens per llama_decode call, llama.cpp's default for both its logical and its physical batch.
BATCH = 512
#: Rows of logits turned into log-probabilities at a time.
ROWS = 64

CACHE_TYPES = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q4_0": lib.GGML_TYPE_Q4_0,
}

F32 = NDArray[np.float32]


class LlamaWorker:
    def __init__(self) -> None:
        self._log: list[str] = []
        self._callback = lib.llama_log_callback(
            lambda level, text, data: self._log.append(text.decode(errors="replace"))
        )
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._tokens: list[int] = []

    def load(self, model: str, cache: str, threads: int, n_ctx: int) -> Mapping[str, Any]:
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}: {''.join(self._log)}")
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, BATCH, BATCH
        context.n_threads = context.n_threads_batch = threads
        context.type_k = context.type_v = CACHE_TYPES[cache]
        context.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = lib.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context with a {cache} cache: {''.join(self._log)}")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._n_vocab = lib.llama_vocab_n_tokens(self._vocab)
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        for i in range(BATCH):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0
        return {
            "version": f"llama-cpp-python {lib.__version__}",
            "system": lib.llama_print_system_info().decode(),
            "n_ctx": lib.llama_n_ctx(self._context),
            "kv_bytes": self._kv_bytes(),
            "notes": [
                line.strip() for line in self._log if re.match(r"llama_(kv_cache: attn_rot|context: flash)", line)
            ],
        }

    def _kv_bytes(self) -> int:
        """Bytes of the cache's buffers for n_ctx tokens, as llama.cpp's own log gives them (MiB, two decimals)."""
        sizes = [re.search(r"KV buffer size = +([\d.]+) MiB", line) for line in self._log]
        return round(sum(float(size.group(1)) for size in sizes if size) * 2**20)

    def tokenize(self, text: str) -> Mapping[str, Any]:
        data = text.encode()
        tokens = (lib.llama_token * (len(data) + 8))()
        n = lib.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), False, True)
        if n < 0:
            raise RuntimeError(f"llama_tokenize needs room for {-n} tokens, got {len(tokens)}")
        return {"tokens": list(tokens[:n])}

    def prefill(self, tokens: list[int], marks: list[int]) -> Mapping[str, Any]:
        """From an empty cache; seconds from the start until each of `marks` tokens is in it. The last mark, which
        must be len(tokens), includes the choice of the next token."""
        self._clear()
        wanted, seconds = set(marks), {}
        start = time.perf_counter()
        for end in self._chunks(tokens, marks):
            self._decode(tokens[len(self._tokens) : end], last_logits=end == len(tokens))
            if end == len(tokens):
                int(np.argmax(self._logits(-1)))
            elif end in wanted:
                lib.llama_synchronize(self._context)
            if end in wanted:
                seconds[str(end)] = time.perf_counter() - start
        return {"seconds": seconds}

    def decode(self, context: int, n: int, temperature: float = 0.0, top_p: float = 1.0) -> Mapping[str, Any]:
        """Cut the cache down to its first `context` tokens and generate n, greedily at temperature 0. The time of a
        token is that of one llama_decode and one argmax, or one pass through llama.cpp's samplers; the step that makes
        the first logits is not counted."""
        if context > len(self._tokens):
            raise ValueError(f"the cache holds {len(self._tokens)} tokens, {context} were asked for")
        last = self._tokens[context - 1]
        self._truncate(context - 1)
        self._decode([last], last_logits=True)
        with self._sampler(temperature, top_p) as sample:
            token = sample()
            generated, seconds = [token], []
            for _ in range(n):
                start = time.perf_counter()
                self._decode([token], last_logits=True)
                token = sample()
                seconds.append(time.perf_counter() - start)
                generated.append(token)
        self._truncate(context)
        return {"seconds": seconds, "tokens": generated}

    @contextlib.contextmanager
    def _sampler(self, temperature: float, top_p: float) -> Iterator[Callable[[], int]]:
        """Chooses the next token from the last logits."""
        if temperature == 0:
            yield lambda: int(np.argmax(self._logits(-1)))
            return
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        # Temperature first, as on the other sides: top_p then keeps the same tokens.
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(top_p, 1))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(0))
        try:
            yield lambda: int(lib.llama_sampler_sample(chain, self._context, -1))
        finally:
            lib.llama_sampler_free(chain)

    def nll(self, tokens: list[int]) -> Mapping[str, Any]:
        """-log p of tokens[1:], each given all before it."""
        self._clear()
        result: list[float] = []
        for start in range(0, len(tokens), BATCH):
            chunk = tokens[start : start + BATCH]
            self._decode(chunk, all_logits=True)
            logits = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (len(chunk), self._n_vocab))
            targets = tokens[start + 1 : start + BATCH + 1]
            for row in range(0, len(targets), ROWS):
                logprobs = _log_softmax(logits[row : row + ROWS][: len(targets) - row])
                result.extend(-float(p[t]) for p, t in zip(logprobs, targets[row : row + ROWS], strict=True))
        return {"nll": result}

    def greedy(self, tokens: list[int], n: int) -> Mapping[str, Any]:
        """n greedy tokens after `tokens`."""
        self._clear()
        for end in self._chunks(tokens, []):
            self._decode(tokens[len(self._tokens) : end], last_logits=end == len(tokens))
        generated = [int(np.argmax(self._logits(-1)))]
        while len(generated) < n:
            self._decode(generated[-1:], last_logits=True)
            generated.append(int(np.argmax(self._logits(-1))))
        return {"tokens": generated}

    def greedy_along(self, prompt: list[int], continuation: list[int]) -> Mapping[str, Any]:
        """What greedy decoding would choose at every token of a continuation, given those before it: the two likeliest
        tokens with their log-probabilities."""
        self._clear()
        for end in self._chunks(prompt, []):
            self._decode(prompt[len(self._tokens) : end], last_logits=end == len(prompt))
        steps = []
        for i, token in enumerate(continuation):
            logprobs = _log_softmax(self._logits(-1)[None])[0]
            second, best = np.argsort(logprobs, kind="stable")[-2:]
            steps.append([int(best), float(logprobs[best]), int(second), float(logprobs[second])])
            if i + 1 < len(continuation):
                self._decode([token], last_logits=True)
        return {"steps": steps}

    def _chunks(self, tokens: Sequence[int], marks: Sequence[int]) -> list[int]:
        """Ends of the calls that prefill `tokens`: whole batches, cut at marks."""
        return sorted({*range(BATCH, len(tokens), BATCH), *marks, len(tokens)})

    def _decode(self, tokens: Sequence[int], *, last_logits: bool = False, all_logits: bool = False) -> None:
        batch, past = self._batch, len(self._tokens)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = past + i
            batch.logits[i] = all_logits
        batch.logits[len(tokens) - 1] = all_logits or last_logits
        status = lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        self._tokens.extend(tokens)

    def _logits(self, index: int) -> F32:
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, index), (self._n_vocab,))

    def _clear(self) -> None:
        lib.llama_memory_clear(self._memory, True)
        self._tokens.clear()

    def _truncate(self, n: int) -> None:
        if not lib.llama_memory_seq_rm(self._memory, 0, n, -1):
            raise RuntimeError(f"llama.cpp cannot cut its cache to {n} tokens")
        del self._tokens[n:]


def _log_softmax(logits: F32) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


if __name__ == "__main__":
    worker = LlamaWorker()
    serve({
        "load": worker.load, "tokenize": worker.tokenize, "prefill": worker.prefill, "decode": worker.decode,
        "nll": worker.nll, "greedy": worker.greedy, "greedy_along": worker.greedy_along,
    })  # fmt: skip
