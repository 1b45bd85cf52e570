"""Loading the TensorRT module by backend name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.tensorrt.module import load_trt


def test_unknown_backend_lists_the_choices() -> None:
    with pytest.raises(BuildError, match="unknown backend 'onnx'; choose one of tensorrt-rtx, tensorrt"):
        load_trt("onnx")


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_missing_package_names_the_extra(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=rf"pip install 'qwen4exp-trt\[{backend}\]'"):
        load_trt.__wrapped__(backend)


@pytest.mark.trt
def test_rtx_module_is_loaded_once() -> None:
    module: Any = load_trt("tensorrt-rtx")
    assert module is load_trt("tensorrt-rtx")
    assert module.__name__ == "tensorrt_rtx"


@pytest.mark.trt
def test_an_import_without_the_preload_is_refused() -> None:
    """In a fresh process, where another module imported TensorRT first: its parser would abort at a plugin node."""
    code = "import tensorrt_rtx; from qwen4exp_trt.runtime.tensorrt.module import load_trt; load_trt('tensorrt-rtx')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "BuildError: tensorrt_rtx was imported before" in result.stderr
