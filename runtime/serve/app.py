"""The HTTP application: routes, errors in OpenAI's form, limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen4exp_trt.errors import Q4eError
from qwen4exp_trt.runtime.async_llm import AsyncLLM
from qwen4exp_trt.runtime.serve.api_errors import ApiError, error_from_engine, error_from_validation, unavailable
from qwen4exp_trt.runtime.serve.chat import ChatCompletion
from qwen4exp_trt.runtime.serve.completions import Completion
from qwen4exp_trt.runtime.serve.live_response import (
    CLIENT_GONE,
    ClientGoneError,
    JSONText,
    event_stream,
    until_disconnect,
)
from qwen4exp_trt.runtime.serve.prometheus import ServerMetrics
from qwen4exp_trt.runtime.serve.protocol import ChatRequest, CompletionRequest
from qwen4exp_trt.runtime.serve.security import HEALTH_PATH, ApiKey, Gatekeeper


@dataclass(frozen=True)
class ServerOptions:
    """``api_key`` None: anyone on this machine. ``max_open``: requests at a time. ``max_body_bytes``: of each."""

    model_name: str
    api_key: str | None
    max_open: int
    max_body_bytes: int


def make_app(llm: AsyncLLM, options: ServerOptions) -> ASGIApp:
    """The application that serves ``llm``, which the caller closes."""
    app = FastAPI(openapi_url=None, max_body_size=options.max_body_bytes)
    metrics = ServerMetrics(llm.metrics)
    _add_completions(app, llm, options)
    _add_information(app, llm, options, metrics)
    _add_error_handlers(app)
    key = None if options.api_key is None else ApiKey(options.api_key)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    return _CountResponses(Gatekeeper(app, key, options.max_open, options.max_body_bytes), metrics, paths)


def _add_completions(app: FastAPI, llm: AsyncLLM, options: ServerOptions) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(body.model, options)
        if len(body.prompt) > options.max_open:
            message = f"{len(body.prompt)} prompts; this server takes at most {options.max_open} at a time"
            raise ApiError(400, message, param="prompt")
        return await _answer(request, Completion(llm, body, options.model_name), bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _check_model(body.model, options)
        return await _answer(request, ChatCompletion(llm, body, options.model_name), bool(body.stream))


def _add_information(app: FastAPI, llm: AsyncLLM, options: ServerOptions, metrics: ServerMetrics) -> None:
    model = {
        "id": options.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "qwen4exp-trt",
        "max_model_len": llm.manifest.limits.max_seq_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(name, options)
        return model

    @app.get(HEALTH_PATH)
    async def health() -> dict[str, str]:
        if llm.error is not None:
            raise unavailable(str(llm.error))
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _check_model(name: str | None, options: ServerOptions) -> None:
    if name is not None and name != options.model_name:
        message = f"the model {name!r} is not served here; this server has {options.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def _answer(request: Request, answer: Completion | ChatCompletion, is_stream: bool) -> Response:
    if is_stream:
        return await event_stream(request.receive, answer.events())
    return JSONText(await until_disconnect(request.receive, answer.body()))


def _add_error_handlers(app: FastAPI) -> None:
    def handle(kind: type[Exception], convert: Callable[[Any], ApiError]) -> None:
        @app.exception_handler(kind)
        async def respond(_: Request, error: Any) -> JSONResponse:
            return convert(error).response()

    handle(ApiError, lambda error: error)
    handle(Q4eError, error_from_engine)
    handle(RequestValidationError, lambda error: error_from_validation(error.errors()))
    handle(HTTPException, lambda error: ApiError(error.status_code, str(error.detail), headers=error.headers))
    handle(ClientGoneError, lambda _: ApiError(CLIENT_GONE, "the client has left"))
    handle(Exception, _unexpected)


def _unexpected(_: Exception) -> ApiError:
    """The log has the traceback, by uvicorn; a client is told no more than that it was not at fault."""
    return ApiError(500, "the server failed in an unexpected way; its log says how", code="internal_error")


class _CountResponses:
    """ASGI middleware that counts the answers of ``paths``; those of others are counted together."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: set[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, send_counted if scope["type"] == "http" else send)
