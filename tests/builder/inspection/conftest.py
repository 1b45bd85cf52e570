from __future__ import annotations

from pathlib import Path

import bundles
import pytest

from qwen4exp_trt.builder.inspection.bundle import StepRequest, inspect_bundle
from qwen4exp_trt.builder.inspection.document import Inspection


@pytest.fixture(scope="session")
def engine_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 bundle with the engines of a random model and its draft head, which no test changes."""
    folder = tmp_path_factory.mktemp("inspected")
    checkpoint = bundles.tiny_checkpoint(folder / "checkpoint", mtp_num_hidden_layers=1)
    return bundles.build(checkpoint, folder / "bundle", activation_dtype="bfloat16")


@pytest.fixture(scope="session")
def inspection(engine_bundle: Path) -> Inspection:
    return inspect_bundle(engine_bundle, StepRequest())


@pytest.fixture(scope="session")
def float_bundle(engine_bundle: Path) -> Path:
    """The same checkpoint in float32, without an engine and a draft head."""
    folder = engine_bundle.parent
    return bundles.build(folder / "checkpoint", folder / "float32", draft_head="none")
