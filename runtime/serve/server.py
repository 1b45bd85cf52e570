"""Runs the application on a socket until a signal says stop."""

from __future__ import annotations

import asyncio
import signal
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
    """A socket at the address, which listens once the server runs. Raises `ServerError` if the address is not to be had."""
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


async def serve(
    llm: AsyncLLM, app: ASGIApp, sock: socket.socket, drain_timeout: float, on_ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` is called when requests are taken.

    The signal closes the socket and ``llm``: open requests have ``drain_timeout`` seconds to end. A second signal ends
    them at once.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_timeout) + _LAST_BYTES_S,
    )
    server, stop = _Server(config, on_ready), asyncio.Event()
    with _signals(stop, server):
        running = asyncio.create_task(server.serve(sockets=[sock]))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        closing = asyncio.create_task(llm.close(drain_timeout))
        await running
        if server.force_exit:
            await llm.close()
        await closing


class _Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn would end the process by the signal, after a clean end."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _signals(stop: asyncio.Event, server: uvicorn.Server) -> Iterator[None]:
    """The first signal sets ``stop``, the next one makes the server end without waiting."""

    def receive() -> None:
        server.force_exit = stop.is_set()
        stop.set()

    loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, receive)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
