"""Octavo's server behind the worker protocol: `octavo serve`, and a client that streams completions from it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from benchmarks.octavo_worker import CHUNK, MAX_NUM_SEQS
from benchmarks.protocol import serve

NAME = "served"
START_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 1800.0


class ServerWorker:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._tokens: list[int] = []
        self._ids = itertools.count()

    def load(self, model: str, cache: str, threads: int, n_ctx: int) -> Mapping[str, Any]:
        """`cache` is a codec, or one for keys and one for values: "int8/int4"."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        keys, _, values = cache.partition("/")
        self._process = subprocess.Popen([
            sys.executable, "-m", "octavo", "serve", model, "--port", str(self._port), "--threads", str(threads),
            "--kv-memory", "2GiB", "--k-codec", keys, "--v-codec", values or keys, "--max-model-len", str(n_ctx),
            "--max-num-seqs", str(MAX_NUM_SEQS), "--step-tokens", str(CHUNK), "--served-model-name", NAME,
        ], stdout=subprocess.DEVNULL, env={**os.environ, "OCTAVO_OPEN": "0"})  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"octavo serve has ended (exit status {self._process.returncode})")
            if time.monotonic() > deadline:
                raise TimeoutError(f"octavo serve is not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.01)
        return {"version": "octavo serve", "system": f"HTTP on port {self._port}", "n_ctx": n_ctx}

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)

    def tokenize(self, text: str) -> Mapping[str, Any]:
        connection, response = self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
        with contextlib.closing(connection):
            return {"tokens": json.loads(response.read())["tokens"]}

    def prefill(self, tokens: list[int], marks: list[int]) -> Mapping[str, Any]:
        """Without a prefix hit, which a first token of its own prevents; seconds until the first token has arrived."""
        if marks != [len(tokens)]:
            raise ValueError(f"a client sees the end of a prompt only, not {marks}")
        self._tokens = [1000 + next(self._ids), *tokens[1:]]
        start = time.perf_counter()
        for _ in self._stream(self._tokens, 1):
            return {"seconds": {str(len(tokens)): time.perf_counter() - start}}
        raise RuntimeError("the server sent no token")

    def decode(self, context: int, n: int) -> Mapping[str, Any]:
        """Generate n tokens greedily after the first `context` tokens of the last prefill. A token's time is that
        between its chunk's arrival and the one before."""
        times = [time.perf_counter() for _ in self._stream(self._tokens[:context], n + 1)]
        if len(times) != n + 1:
            raise RuntimeError(f"{len(times)} chunks with text, expected one for each of {n + 1} tokens")
        return {"seconds": [b - a for a, b in pairwise(times)]}

    def _stream(self, tokens: list[int], n: int) -> Iterator[None]:
        """Once for every chunk that brings a token."""
        connection, response = self._post("/v1/completions", {
            "model": NAME, "prompt": tokens, "max_tokens": n, "temperature": 0, "stream": True, "ignore_eos": True,
        })  # fmt: skip
        with contextlib.closing(connection):
            for line in response:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    yield

    def _post(self, path: str, body: Mapping[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {response.read()[:500]!r}")
        return connection, response


if __name__ == "__main__":
    worker = ServerWorker()
    try:
        serve({
            "load": worker.load,
            "tokenize": worker.tokenize,
            "prefill": worker.prefill,
            "decode": worker.decode,
        })  # fmt: skip
    finally:
        worker.close()
