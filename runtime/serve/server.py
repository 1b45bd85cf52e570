"""Runs the application on a socket until a signal says stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from qwen4exp_trt.errors import ServerError
from qwen4exp_trt.runtime.async_llm import AsyncLLM

_KEEP_ALIVE_S = 30
_LAST_BYTES_S = 5
"""For clients to take what ended their requests, after the time to drain."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at the address, which does not listen yet. Raises `ServerError` if the address is not to be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise ServerError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --host or --port "
            "(0: any that is free)"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """The URL of the server on a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class StopSignal:
    """Says stop to `serve`, from within its event loop; said again, that there is no time left."""

    def __init__(self) -> None:
        self.is_said, self.is_urgent = asyncio.Event(), asyncio.Event()

    def say(self) -> None:
        if self.is_said.is_set():
            self.is_urgent.set()
        self.is_said.set()


async def serve(
    llm: AsyncLLM,
    app: ASGIApp,
    sock: socket.socket,
    drain_timeout: float,
    on_ready: Callable[[], None],
    stop: StopSignal,
) -> None:
    """Serve on ``sock`` until ``stop``; ``on_ready`` is called when requests are taken.

    Then the socket and ``llm`` are closed: open requests have ``drain_timeout`` seconds to end.
    """
    config = uvicorn.Config(
        app,
        http="h11",  # which bounds the head of a request; httptools, where it is installed, does not
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_timeout) + _LAST_BYTES_S,
    )
    server = _Server(config, on_ready)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    await _until(running, stop.is_said)
    server.should_exit = True
    closing = asyncio.create_task(llm.close(drain_timeout))
    await _until(running, stop.is_urgent)
    if not running.done():
        server.force_exit = True
        await llm.close()
    await running
    await closing


async def _until(task: asyncio.Task[None], event: asyncio.Event) -> None:
    """Wait for the end of ``task`` or for ``event``."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to its caller: uvicorn would end the process by the signal, after a clean end."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
