from __future__ import annotations

from pathlib import Path

import bundles
import pytest
from simulated_session import HandMadeSession
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.runtime.tensorrt.module import load_trt


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return bundles.build_with_stand_in(bundles.tiny_checkpoint(base / "tiny-checkpoint"), base / "stand-in")


@pytest.fixture
def trt(bundle: Path) -> SimulatedTensorRT:
    return SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle)


@pytest.fixture
def session(trt: SimulatedTensorRT) -> HandMadeSession:
    return HandMadeSession(trt)
