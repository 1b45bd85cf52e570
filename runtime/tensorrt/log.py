"""A TensorRT logger that keeps messages for errors of ours and prints nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from qwen4exp_trt.plugins.tensorrt import take_callback_errors

_MOST_ERRORS = 100


def make_log(trt: ModuleType, keeps_verbose: Callable[[str], bool] | None = None) -> Any:
    """An ``ILogger`` with ``problems()``: the last errors since it was last called, and those of plugins, in one line.

    With ``keeps_verbose`` it has ``messages`` too, all but the verbose ones that this refuses.
    """
    return _log_class(trt)(keeps_verbose)


def one_line(message: str) -> str:
    return " ".join(message.split())


@cache
def _log_class(trt: ModuleType) -> type:
    class Log(trt.ILogger):
        def __init__(self, keeps_verbose: Callable[[str], bool] | None) -> None:
            trt.ILogger.__init__(self)
            self.keeps_verbose = keeps_verbose
            self.messages: list[str] = []
            self._errors: deque[str] = deque(maxlen=_MOST_ERRORS)

        def log(self, severity: Any, message: str) -> None:
            keeps = self.keeps_verbose
            if keeps is not None and (severity != trt.ILogger.VERBOSE or keeps(message)):
                self.messages.append(message)
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self._errors.append(message)

        def problems(self) -> str:
            found = [*take_callback_errors(), *self._errors]  # a plugin's are the cause of what TensorRT logs
            self._errors.clear()
            return "; ".join(dict.fromkeys(map(one_line, found))) or "TensorRT logged no error"

    return Log
