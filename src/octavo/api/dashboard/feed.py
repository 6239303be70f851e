"""What the page shows of the cache, told whenever it changes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, TypedDict

from octavo.api.errors import encode_json, unavailable
from octavo.api.streaming import Frames, sse_comment
from octavo.engine.client import EngineClient, FrameMap


class CacheSnapshot(TypedDict):
    """The cache at one moment.

    `frames` lists the arena in order, written shortly: a number is so many unused frames in a row; a string is one
    frame in use: a letter for its class ("A" the first of info.page_classes, "B" the second ...), then one per slot, as
    in `FrameMap.states`.
    """

    model: str
    info: dict[str, Any]
    stats: dict[str, Any]
    frames: list[str | int]


def take_snapshot(engine: EngineClient, model: str) -> CacheSnapshot:
    """May wait for the engine's step in progress; not for the event loop."""
    info = engine.info
    return {
        "model": model,
        "info": {
            "backend": info.backend,
            "max_model_len": info.max_model_len,
            "page_size": info.page_size,
            "key_codec": info.key_codec,
            "value_codec": info.value_codec,
            "bytes_per_token": info.bytes_per_token,
            "prefix_cache": info.prefix_cache,
            "page_classes": [asdict(page_class) for page_class in info.page_classes],
        },
        "frames": _short(engine.page_map()),
        "stats": asdict(engine.stats()),
    }


def _short(page_map: list[FrameMap]) -> list[str | int]:
    short: list[str | int] = []
    for frame in page_map:
        if frame.page_class is not None:
            short.append(chr(ord("A") + frame.page_class) + frame.states)
        elif short and isinstance(short[-1], int):
            short[-1] += 1
        else:
            short.append(1)
    return short


class CacheFeed:
    """Looks at the cache for all watchers at once, and only while there are any."""

    def __init__(self, engine: EngineClient, model: str, *, period_s: float, keepalive_s: float, limit: int) -> None:
        self._engine = engine
        self._model = model
        self._period_s = period_s
        self._keepalive_s = keepalive_s
        self._limit = limit
        self._watchers = 0
        self._latest = b""
        self._version = 0
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[CacheSnapshot] | None = None
        self._error: Exception | None = None
        self._closed = False

    async def snapshot(self) -> CacheSnapshot:
        """The cache now. Whoever asks at the same time shares one look, since each may wait for the engine's step."""
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(asyncio.to_thread(take_snapshot, self._engine, self._model))
        return await asyncio.shield(self._taking)

    def enter(self) -> None:
        """Raises ApiError (503) when too many watch already. Must be paired with `leave`."""
        if self._watchers >= self._limit:
            message = f"{self._watchers} browsers watch the cache already, the limit is {self._limit}"
            raise unavailable(message, retry_after_s=10, code="too_many_watchers")
        self._watchers += 1
        if self._looking is None or self._looking.done():
            self._error = None
            self._looking = asyncio.create_task(self._look())

    def leave(self) -> None:
        self._watchers -= 1

    def close(self) -> None:
        """End all watching; the server is about to stop."""
        self._closed = True
        self._publish()

    async def frames(self) -> Frames:
        """Each state of the cache, from the present one on. A state that passes between two looks is not seen.

        Raises what looking at the engine raised.
        """
        seen = 0
        while not self._closed:
            if self._version == seen:
                try:
                    async with asyncio.timeout(self._keepalive_s):
                        await self._changed.wait()
                except TimeoutError:
                    yield sse_comment("unchanged")
                    continue
            if self._error is not None:
                raise self._error
            seen = self._version
            if not self._closed and self._latest:
                yield b"data: " + self._latest + b"\n\n"

    async def _look(self) -> None:
        try:
            while self._watchers and not self._closed:
                snapshot = encode_json(await self.snapshot())
                if snapshot != self._latest:
                    self._latest = snapshot
                    self._publish()
                await asyncio.sleep(self._period_s)
        except Exception as error:  # noqa: BLE001 - handed to the watchers
            self._error = error
            self._publish()

    def _publish(self) -> None:
        self._version += 1
        passed, self._changed = self._changed, asyncio.Event()
        passed.set()
