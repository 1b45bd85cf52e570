from __future__ import annotations

from pathlib import Path

import bundles
import pytest
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.tensorrt.module import load_trt


@pytest.fixture(scope="session")
def engine_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BF16 bundle of a random model, with its engine; its checkpoint is beside it."""
    folder = tmp_path_factory.mktemp("engine")
    checkpoint = bundles.tiny_checkpoint(folder / "checkpoint")
    return bundles.build(checkpoint, folder / "bundle", activation_dtype="bfloat16", prefill_chunk=32)


@pytest.fixture
def trt(engine_bundle: Path) -> SimulatedTensorRT:
    return SimulatedTensorRT(load_trt("tensorrt-rtx"), engine_bundle)


@pytest.fixture
def loaded(engine_bundle: Path) -> EagerBackend:
    """The program of the bundle with its weights, and states of its own."""
    backend = LLM(engine_bundle).core.backend
    assert isinstance(backend, EagerBackend)
    return backend
