"""What is turned away before it reaches the engine, so none is behind these servers."""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server

from qwen4exp_trt.errors import EngineError
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.serve.security import ApiKey, is_loopback

KEY = "correct horse battery staple"


class SilentLLM:
    """Takes requests and never answers; `open` counts those that are not closed."""

    def __init__(self) -> None:
        self.error: EngineError | None = None
        self.default_sampling_params = SamplingParams()
        self.manifest = SimpleNamespace(limits=SimpleNamespace(max_seq_len=64))
        self.open = 0
        self.changed = threading.Condition()

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[None]:
        self._count(1)
        try:
            await asyncio.Event().wait()
            yield None
        finally:
            self._count(-1)

    def wait_for_open(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.open == count, timeout=10)

    def metrics(self) -> list[Any]:
        return []

    async def close(self, timeout: float = 0.0) -> None:
        pass

    def _count(self, change: int) -> None:
        with self.changed:
            self.open += change
            self.changed.notify_all()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(SilentLLM(), max_open=2, max_body_bytes=1000) as server:
        yield server


@pytest.fixture(scope="module")
def locked_server() -> Iterator[LiveServer]:
    with live_server(SilentLLM(), api_key=KEY) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_opens_everything_and_only_health_is_open(locked_server: LiveServer) -> None:
    for path in ("/v1/models", "/metrics", "/nowhere"):
        refused = [locked_server.get(path, headers=headers) for headers in ({}, bearer(KEY[:-1]), bearer(f"{KEY}x"))]
        assert [response.status_code for response in refused] == [401] * 3
        assert refused[0].headers["www-authenticate"] == "Bearer"
        assert refused[0].json()["error"]["code"] == "invalid_api_key"
        assert locked_server.get(path, headers=bearer(KEY)).status_code == (404 if path == "/nowhere" else 200)
    assert locked_server.get("/health").status_code == 200
    # With a key the server may have any name.
    assert locked_server.get("/v1/models", headers={**bearer(KEY), "Host": "llm.example.org"}).status_code == 200


def test_the_openai_client_sends_the_key(locked_server: LiveServer) -> None:
    assert [model.id for model in locked_server.openai(KEY).models.list()] == ["demo"]
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        locked_server.openai("wrong").models.list()


@pytest.mark.parametrize("given", ["Bearer wrong", "Bearer ", "", "Bearer " + "x" * 1000, "Bearer \xff", "Basic key"])
def test_keys_are_compared_in_constant_time(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ApiKey("key")
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    assert not key.admits(given)
    assert key.admits("Bearer key") and key.admits("bearer key")
    # Whatever is sent, all that is compared has one length.
    assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 3


def test_other_hosts_are_refused_without_a_key(server: LiveServer) -> None:
    port = server.url.rpartition(":")[2]
    for host, status in (
        (f"localhost:{port}", 200),
        ("[::1]:80", 200),
        ("LOCALHOST", 200),
        ("attacker.example", 403),
        ("127.0.0.1.attacker.example", 403),
        ("", 403),
    ):
        assert server.get("/v1/models", headers={"Host": host}).status_code == status, host
    assert server.get("/health", headers={"Host": "probe.example"}).status_code == 200


def test_no_page_of_a_browser_may_ask(server: LiveServer) -> None:
    """What a page can send without being asked for permission is no JSON; permission is not given."""
    body = b'{"prompt": "x"}'
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        response = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": content_type})
        assert response.status_code == 400 and "Content-Type" in response.json()["error"]["message"]
    asked = {"Origin": "http://attacker.example", "Access-Control-Request-Method": "POST"}
    response = httpx.options(f"{server.url}/v1/completions", headers=asked)
    assert response.status_code == 405 and "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_large_body_is_refused(server: LiveServer, is_chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * 2000 + b'"}'
    content = iter([body[:900], body[900:]]) if is_chunked else body
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "invalid_request_error")


def test_nothing_is_read_of_a_body_without_the_key(locked_server: LiveServer) -> None:
    host, port = locked_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_a_head_without_end_is_refused(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 70_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_requests_beyond_the_limit_are_turned_away_until_others_leave(server: LiveServer) -> None:
    llm: Any = server.llm

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=1)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    llm.wait_for_open(2)
    response = server.post("/v1/completions", {"prompt": "x"})
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert response.headers["retry-after"] == "1"
    assert server.get("/v1/models").status_code == 200
    for thread in threads:
        thread.join()
    llm.wait_for_open(0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=0.2)
    llm.wait_for_open(0)


def test_an_engine_that_has_stopped_is_not_healthy(locked_server: LiveServer) -> None:
    llm: Any = locked_server.llm
    llm.error = EngineError("the GPU is lost")
    response = locked_server.get("/health")
    llm.error = None
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the GPU is lost")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
