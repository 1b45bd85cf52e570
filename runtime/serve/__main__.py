"""``qwen4exp-serve BUNDLE``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from qwen4exp_trt.errors import ServerError
from qwen4exp_trt.runtime.async_llm import AsyncLLM
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.progress_line import loading_line
from qwen4exp_trt.runtime.runtime_options import add_runtime_options, llm_options

PROG = "qwen4exp-serve"
API_KEY_VARIABLE = "QWEN4EXP_API_KEY"
LOOPBACK = "127.0.0.1"

_MIB = 1 << 20
_THIRD_PARTIES = {"fastapi", "uvicorn", "prometheus_client"}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=PROG, description="Serve a bundle with OpenAI's HTTP API.")
    parser.add_argument("bundle", help="folder made by qwen4exp-build")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host", default=LOOPBACK, help="address to listen on (default: %(default)s, this machine alone)"
    )
    server.add_argument("--port", type=int, default=8000, metavar="N", help="0 for any (default: %(default)s)")
    server.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(API_KEY_VARIABLE),
        help=f"clients must send it; needed for a --host that others can reach (default: ${API_KEY_VARIABLE})",
    )
    server.add_argument("--served-model-name", metavar="NAME", help="the model's name (default: the bundle folder's)")
    server.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="more waiting requests get 429 (default: %(default)s)"
    )
    server.add_argument(
        "--max-body-size", type=int, default=8, metavar="MIB", help="of a request, in MiB (default: %(default)s)"
    )
    server.add_argument(
        "--drain-timeout",
        type=float,
        default=30,
        metavar="S",
        help="seconds that open requests have to end after SIGTERM (default: %(default)s)",
    )
    add_runtime_options(parser)
    args = parser.parse_args(argv)
    if not 0 <= args.port < 1 << 16:
        parser.error(f"--port is {args.port}; 0 to 65535 was expected")
    if args.api_key is not None and not (
        args.api_key.isascii() and args.api_key.isprintable() and args.api_key.strip()
    ):
        parser.error(f"--api-key (or ${API_KEY_VARIABLE}) is empty or not printable ASCII")
    for name, least in (("max_waiting", 0), ("max_body_size", 1), ("drain_timeout", 0)):
        if not getattr(args, name) >= least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; at least {least} was expected")
    return args


def serve(args: argparse.Namespace) -> None:
    """Load the bundle and serve it until a signal says stop."""
    app, security, server = _import_server()
    if args.api_key is None and not security.is_loopback(args.host):
        raise ServerError(
            f"--host {args.host} lets other machines in; give an API key (--api-key or ${API_KEY_VARIABLE}), or listen "
            f"on {LOOPBACK}"
        )
    # The address comes first: a port that is taken is no reason to load a model.
    with server.bound_socket(args.host, args.port) as sock:
        llm = AsyncLLM(args.bundle, max_waiting=args.max_waiting, progress=loading_line().show, **llm_options(args))
        name = args.served_model_name or Path(args.bundle).resolve().name
        max_open = args.max_waiting + llm.max_num_seqs
        options = app.ServerOptions(name, args.api_key, max_open, args.max_body_size * _MIB)

        def say_ready() -> None:
            who = "anyone on this machine" if args.api_key is None else "clients with the API key"
            print(f"{PROG}: {name} is ready for {who} at {server.url_of(sock)}/v1", flush=True)

        async def run() -> None:
            stop = server.StopSignal()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.say)
            await server.serve(llm, app.make_app(llm, options), sock, args.drain_timeout, say_ready, stop)

        asyncio.run(run())


def _import_server() -> tuple[ModuleType, ModuleType, ModuleType]:
    """The modules that need the extra."""
    try:
        from qwen4exp_trt.runtime.serve import app, security, server
    except ModuleNotFoundError as error:
        if error.name not in _THIRD_PARTIES:
            raise
        raise ServerError(f"{error.name} is not installed: pip install 'qwen4exp-trt[serve]'") from error
    return app, security, server


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after SIGTERM or SIGINT, 2 with one line on stderr for a user's mistake."""
    args = parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return run_command(PROG, lambda: serve(args))


if __name__ == "__main__":
    sys.exit(main())
