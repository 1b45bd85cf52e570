"""Answers that end at once when the client goes away: server-sent events, and the wait for a whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qwen4exp_trt.errors import Q4eError
from qwen4exp_trt.runtime.serve.api_errors import ApiError, error_from_engine

T = TypeVar("T")
Event = dict[str, Any]

KEEP_ALIVE_S = 15.0
"""After twice this time a silent stream sends a comment; proxies wait for a minute by default."""

CLIENT_GONE = 499
"""The status of an answer that nobody waits for, as nginx has it; it is never sent."""


class ClientGoneError(Exception):
    """The client has closed the connection."""


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled, with `ClientGoneError`, when the client goes away before."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class JSONText(JSONResponse):
    """JSON with text as it is. A body that cannot be written as UTF-8 does not come from a tokenizer."""

    def render(self, content: Any) -> bytes:
        return _json(content).encode()


class EventStream(Response):
    """Server-sent events in OpenAI's form: ``first`` and ``events`` as data, and ``[DONE]``.

    An error ends the stream with an event that tells it. While there is nothing to send, comments keep the connection
    alive. The client's leaving closes ``events``.
    """

    media_type = "text/event-stream"

    def __init__(self, first: asyncio.Future[Event], events: AsyncGenerator[Event, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events = first, events
        self._is_idle = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        except ClientGoneError:
            pass
        finally:
            await _close(self._first, self._events)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await self._write(send, f"data: {_json(await self._first)}")
            async for event in self._events:
                await self._write(send, f"data: {_json(event)}")
            end = "[DONE]"
        except (ApiError, Q4eError) as error:
            end = _json((error if isinstance(error, ApiError) else error_from_engine(error)).body)
        finally:
            keep_alive.cancel()
        await self._write(send, f"data: {end}", more=False)

    async def _write(self, send: Send, line: str, more: bool = True) -> None:
        self._is_idle = False
        await send({"type": "http.response.body", "body": f"{line}\n\n".encode(), "more_body": more})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._is_idle = True
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._is_idle:
                await self._write(send, ": keep-alive")


async def event_stream(receive: Receive, events: AsyncGenerator[Event, None]) -> EventStream:
    """The response of ``events``, of which there is one at least.

    It waits a while for the first one, so that an error before it is raised here and has its own status.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await until_disconnect(receive, asyncio.wait((first,), timeout=KEEP_ALIVE_S))
        if first.done():
            first.result()
    except BaseException:
        await _close(first, events)
        raise
    return EventStream(first, events)


async def _close(first: asyncio.Future[Event], events: AsyncGenerator[Event, None]) -> None:
    """Give up what is left of ``events``, whose first one may still be on its way."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await events.aclose()


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
