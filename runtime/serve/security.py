"""Who may ask, and how much at a time: an API key, the Host of loopback servers, and the number of open requests."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen4exp_trt.runtime.serve.api_errors import ApiError, overloaded

HEALTH_PATH = "/health"
"""Open to everyone: those who watch over a server need not be able to use it."""


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is this machine itself and no other can reach it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ApiKey:
    """A key that clients must have."""

    def __init__(self, key: str) -> None:
        self._digest = _digest(key.encode())

    def admits(self, authorization: str) -> bool:
        """Whether the value of an ``Authorization`` header is ``Bearer`` and the key.

        The time that it takes tells nothing about the key: digests of one length are compared, all bytes of them.
        """
        scheme, _, given = authorization.partition(" ")
        is_key = hmac.compare_digest(_digest(given.strip().encode("latin-1", "replace")), self._digest)
        return is_key and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Gatekeeper:
    """ASGI middleware that turns requests away by their head, before anything of the body is read.

    With ``key`` None the server is for this machine only, and a Host that is another machine's is refused: a web page
    could else reach the server under a name of its own (DNS rebinding). ``max_open`` bounds the requests with a body
    that are in work at a time, ``max_body_bytes`` what each may say of its length; FastAPI counts those that do not.
    """

    def __init__(self, app: ASGIApp, key: ApiKey | None, max_open: int, max_body_bytes: int) -> None:
        self._app, self._key, self._max_open, self._max_body_bytes = app, key, max_open, max_body_bytes
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, has_body = Headers(scope=scope), scope["method"] == "POST"
        refusal = None if scope["path"] == HEALTH_PATH else self._refusal(headers)
        if refusal is None and has_body:
            refusal = self._refusal_of_body(headers.get("content-length", ""))
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        self._num_open += has_body
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= has_body

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._key is None:
            host = _without_port(headers.get("host", ""))
            if not is_loopback(host):
                return ApiError(
                    403, f"Host is {host!r}; without an API key this server answers to loopback names only", code="host"
                )
        elif not self._key.admits(headers.get("authorization", "")):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None

    def _refusal_of_body(self, length: str) -> ApiError | None:
        if length.isdigit() and int(length) > self._max_body_bytes:
            return ApiError(413, f"the body has {length} bytes; at most {self._max_body_bytes} are allowed")
        if self._num_open >= self._max_open:
            return overloaded(f"{self._num_open} requests are open, the most that this server takes at a time")
        return None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
