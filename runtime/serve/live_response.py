"""Answers that end at once when the client goes away: server-sent events, and the wait for a whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qwen4exp_trt.errors import Q4eError
from qwen4exp_trt.runtime.serve.api_errors import ApiError, error_from_engine

T = TypeVar("T")

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

    An error after the first event ends the stream with an event that tells it. The client's leaving closes ``events``.
    """

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], events: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await until_disconnect(receive, self._send(send))
        except ClientGoneError:
            pass

    async def _send(self, send: Send) -> None:
        async def send_data(data: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await send_data(_json(self._first))
            async for event in self._events:
                await send_data(_json(event))
        except (ApiError, Q4eError) as error:
            told = error if isinstance(error, ApiError) else error_from_engine(error)
            await send_data(_json(told.body), more=False)
        else:
            await send_data("[DONE]", more=False)


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
