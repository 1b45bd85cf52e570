"""A TensorRT logger that keeps messages for errors of ours and prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from qwen4exp_trt.plugins.tensorrt import take_callback_errors


def make_log(trt: ModuleType, keeps_verbose: Callable[[str], bool] = lambda message: False) -> Any:
    """An ``ILogger`` with ``messages`` (all but the verbose ones that ``keeps_verbose`` refuses), ``errors``, and
    ``problems()``, the errors and those of plugins in one line."""
    return _log_class(trt)(keeps_verbose)


def one_line(message: str) -> str:
    return " ".join(message.split())


@cache
def _log_class(trt: ModuleType) -> type:
    class Log(trt.ILogger):
        def __init__(self, keeps_verbose: Callable[[str], bool]) -> None:
            trt.ILogger.__init__(self)
            self.keeps_verbose = keeps_verbose
            self.messages: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity != trt.ILogger.VERBOSE or self.keeps_verbose(message):
                self.messages.append(message)
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

        def problems(self) -> str:
            self.errors[:0] = take_callback_errors()  # they are the cause of what TensorRT logs
            return "; ".join(dict.fromkeys(map(one_line, self.errors))) or "TensorRT logged no error"

    return Log
