from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from build_command import FLOAT32

from qwen4exp_trt.builder import build as build_module
from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.compile import CompiledProgram, ExportOptions, compile_program
from qwen4exp_trt.builder.engine import EngineBuild
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.passes.pipeline import Quantization


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return bundles.tiny_checkpoint(tmp_path_factory.getbasetemp() / "tiny-checkpoint")


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def compiled(checkpoint: Path) -> CompiledProgram:
    return compile_program(ModelConfig.from_dir(checkpoint), ExportOptions("float32", "auto", 8), Quantization())


@pytest.fixture(scope="module")
def quick_builds() -> Iterator[None]:
    with bundles.quick_builds():
        yield


@pytest.fixture
def quick(compiled: CompiledProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds take the program compiled before and a stand-in for the engine: for what happens around them."""

    def compile_quickly(
        config: Any, options: Any, quantization: Any, stage: Callable[[str], None], mark_inputs_of: Any
    ) -> CompiledProgram:
        for name in ("export", "passes", "lower"):
            stage(name)
        return compiled

    monkeypatch.setattr(build_module, "compile_program", compile_quickly)
    monkeypatch.setattr(build_module, "_load_trt", lambda options: torch if options.has_engine else None)
    monkeypatch.setattr(
        build_module,
        "build_engine",
        lambda *args: EngineBuild(b"engine", {"activation_bytes": {"decode": 2**20, "prefill": 3 * 2**20}}),
    )


@pytest.fixture
def bundle(quick: None, checkpoint: Path, tmp_path: Path) -> Path:
    """An earlier bundle under the name that the test builds."""
    assert main([str(checkpoint), "-o", str(tmp_path / "bundle"), *FLOAT32]) == 0
    return tmp_path / "bundle"
