"""What is kept of TensorRT's messages."""

from __future__ import annotations

from typing import Any

import pytest

from qwen4exp_trt.plugins import tensorrt as shells
from qwen4exp_trt.runtime.tensorrt.log import make_log
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.trt


@pytest.fixture(scope="module")
def trt() -> Any:
    return load_trt("tensorrt-rtx")


def test_a_problem_is_told_once(trt: Any) -> None:
    log = make_log(trt)
    log.log(trt.ILogger.ERROR, "first\n reason")
    log.log(trt.ILogger.INTERNAL_ERROR, "second")
    log.log(trt.ILogger.WARNING, "of no matter")
    assert log.problems() == "first reason; second"
    assert log.problems() == "TensorRT logged no error"
    log.log(trt.ILogger.ERROR, "third")
    assert log.problems() == "third"


def test_what_a_plugin_says_comes_first(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log(trt)
    log.log(trt.ILogger.ERROR, "enqueue failed")
    monkeypatch.setattr(shells, "_callback_errors", ["node a: out of memory"])
    assert log.problems() == "node a: out of memory; enqueue failed"


def test_what_is_kept_has_an_end(trt: Any) -> None:
    """Unless somebody wants to read it all: a server runs for weeks."""
    log, of_build = make_log(trt), make_log(trt, lambda message: message == "kept")
    for severity in (trt.ILogger.WARNING, trt.ILogger.ERROR):
        for index in range(500):
            log.log(severity, f"message {index}")
            of_build.log(severity, f"message {index}")
    for message in ("kept", "dropped"):
        of_build.log(trt.ILogger.VERBOSE, message)
    assert log.messages == []
    assert log.problems().split("; ") == [f"message {index}" for index in range(400, 500)]
    assert len(of_build.messages) == 1001 and of_build.messages[-1] == "kept"
