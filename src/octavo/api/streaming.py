"""Server-sent events: frames as OpenAI streams them, errors in mid-stream, disconnects noticed at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.api.errors import ClientGone, encode_json, to_api_error
from octavo.api.generation import while_connected

DONE = b"data: [DONE]\n\n"

Frames = AsyncGenerator[bytes, None]


def sse_data(content: object) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"


def sse_comment(text: str) -> bytes:
    """A line that clients ignore; it keeps proxies from closing a silent connection."""
    return f": {text}\n\n".encode()


class EventStreamResponse(Response):
    """Sends frames as they come.

    An exception from the frames ends the stream with an error event, without [DONE]. When the client goes
    away the frames are closed at whatever point they stand. `close` is called once the response is over,
    however it ends, also where the frames were never started.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: Frames, *, close: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        # Proxies must pass events on as they come.
        self.headers["Cache-Control"] = "no-cache, no-store"
        self.headers["X-Accel-Buffering"] = "no"
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._send_frames(send))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            return
        finally:
            self._close()

    async def _send_frames(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:  # noqa: BLE001 - the status has been sent, so the stream itself must tell
            frame = sse_data(to_api_error(error).body())
            await send({"type": "http.response.body", "body": frame, "more_body": True})
