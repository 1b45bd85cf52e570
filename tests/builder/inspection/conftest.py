from __future__ import annotations

from pathlib import Path

import bundles
import pytest

from qwen4exp_trt.builder.inspection.bundle import StepRequest, inspect_bundle
from qwen4exp_trt.builder.inspection.document import Inspection


@pytest.fixture(scope="session")
def mtp_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a draft head, which no test changes."""
    return bundles.mtp_checkpoint(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def engine_bundle(mtp_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 bundle with the engines of a random model and its draft head, which no test changes."""
    with bundles.quick_builds():
        folder = tmp_path_factory.mktemp("inspected") / "bundle"
        return bundles.build(mtp_checkpoint, folder, activation_dtype="bfloat16")


@pytest.fixture(scope="session")
def inspection(engine_bundle: Path) -> Inspection:
    return inspect_bundle(engine_bundle, StepRequest())


@pytest.fixture(scope="session")
def float_bundle(mtp_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint in float32, without an engine and a draft head."""
    with bundles.quick_builds():
        return bundles.build(mtp_checkpoint, tmp_path_factory.mktemp("float32") / "bundle", draft_head="none")


@pytest.fixture(scope="session")
def float_inspection(float_bundle: Path) -> Inspection:
    return inspect_bundle(float_bundle, StepRequest())
