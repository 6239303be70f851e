"""Server-sent events: frames as OpenAI and Anthropic stream them, errors in mid-stream, disconnects noticed at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.api.errors import ApiError, ClientGone, encode_json, to_api_error
from octavo.api.generation import Generation, while_connected

DONE = b"data: [DONE]\n\n"

Frames = AsyncGenerator[bytes, None]
ErrorFrame = Callable[[ApiError], bytes]


def sse_data(content: object) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"


def sse_event(content: Mapping[str, object]) -> bytes:
    """An event that is named after its own `type`, as Anthropic streams them."""
    return f"event: {content['type']}\n".encode() + sse_data(content)


def sse_comment(text: str) -> bytes:
    """A line that clients ignore; it keeps proxies from closing a silent connection."""
    return f": {text}\n\n".encode()


def openai_error_frame(error: ApiError) -> bytes:
    return sse_data(error.body())


def anthropic_error_frame(error: ApiError) -> bytes:
    return sse_event(error.anthropic_body())


class EventStreamResponse(Response):
    """Sends frames as they come.

    An exception from the frames ends the stream with `error_frame`, without [DONE]. When the client goes
    away the frames are closed at whatever point they stand. `close` is called once the response is over,
    however it ends, also where the frames were never started.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: Frames, *, close: Callable[[], None], error_frame: ErrorFrame = openai_error_frame
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        # Proxies must pass events on as they come.
        self.headers["Cache-Control"] = "no-cache, no-store"
        self.headers["X-Accel-Buffering"] = "no"
        self._frames = frames
        self._close = close
        self._error_frame = error_frame

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
            frame = self._error_frame(to_api_error(error))
            await send({"type": "http.response.body", "body": frame, "more_body": True})


async def stream_answer(
    generation: Generation, frames: Frames, *, wait_s: float, error_frame: ErrorFrame = openai_error_frame
) -> EventStreamResponse:
    """Stream a generation that has been submitted. A refusal within `wait_s` is raised, so that it has a status."""
    try:
        await generation.admitted(wait_s)
    except BaseException:
        generation.close()
        raise
    return EventStreamResponse(frames, close=generation.close, error_frame=error_frame)
