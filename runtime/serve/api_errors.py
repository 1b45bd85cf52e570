"""Errors as OpenAI's API words them: a status code and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from qwen4exp_trt.errors import DroppedError, EngineError, PromptTooLongError, Q4eError, QueueFullError, RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

RETRY_AFTER_S = 1
"""When a client that was turned away for the load may come again: a request ends every few steps."""


class ApiError(Exception):
    """What a client did wrong, or what went wrong for it. ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def overloaded(message: str) -> ApiError:
    """429: there is no room now, but there will be."""
    return ApiError(429, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})


def unavailable(message: str) -> ApiError:
    """503: this server will not answer."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


def error_from_engine(error: Q4eError) -> ApiError:
    """What an error of the runtime means to the client whose request met it."""
    if isinstance(error, QueueFullError):
        return overloaded(str(error))
    if isinstance(error, EngineError):
        return unavailable(str(error))
    if isinstance(error, DroppedError) or not isinstance(error, RequestError):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), code="context_length_exceeded")
    message = str(error).removeprefix("SamplingParams.")
    is_param = message != str(error)
    return ApiError(400, message, param=message.split()[0] if is_param else None)


def error_from_validation(problems: Sequence[Any]) -> ApiError:
    """400: what pydantic found wrong in a request's body, each with the place of the field."""
    params, messages = [], []
    for problem in problems:
        place = ".".join(str(part) for part in problem["loc"] if part != "body")
        params.append(place)
        messages.append(f"{place}: {_wording(problem)}" if place else _wording(problem))
    return ApiError(400, "; ".join(messages), param=params[0] or None if params else None)


def _wording(problem: Mapping[str, Any]) -> str:
    kind = problem["type"]
    if kind == "extra_forbidden":
        return "this server does not know the field"
    if kind == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
    if kind == "model_attributes_type" and len(problem["loc"]) == 1:
        return "the body is no JSON object; send one, with 'Content-Type: application/json'"
    if kind == "missing":
        return "a value is needed"
    return str(problem["msg"])
