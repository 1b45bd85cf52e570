"""What the commands share: one line on stderr and an exit code for whatever goes wrong."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from qwen4exp_trt.errors import Q4eError

USER_ERROR = 2
INTERRUPTED = 130
"""Exit codes; the second is that of a process that SIGINT ended."""


_BYTE_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def byte_count(text: str) -> int:
    """An argument such as ``4GiB``, ``1.5GiB`` or ``65536`` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or a number with KiB, MiB, GiB or TiB")
    number, unit = match.groups(default="")
    return int(float(number) * _BYTE_UNITS[unit])


class OneLineParser(argparse.ArgumentParser):
    """Refuses arguments in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def run_command(prog: str, command: Callable[[], int | None]) -> int:
    """Run ``command`` and return the exit code of the process: of the command, or 0 if it has none."""
    code = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal's encoding lacks is no failure
    try:
        code = command()
        sys.stdout.flush()
    except Q4eError as error:
        message = " ".join(line.strip() for line in str(error).splitlines())
        print(f"{prog}: error: {message}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has what it wants.
        _drop_stdout()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_stdout()
        print(f"{prog}: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return USER_ERROR
    return code or 0


def _drop_stdout() -> None:
    """Python flushes stdout once more at exit: let it find an end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
