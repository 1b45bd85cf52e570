from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen4exp_trt.runtime.bench import session
from qwen4exp_trt.runtime.bench.__main__ import main
from qwen4exp_trt.runtime.bench.rates import Bandwidth

QUICK = ("--quick", "--iterations", "3", "--seconds", "5")


@pytest.fixture(autouse=True, scope="package")
def _no_large_buffers() -> Iterator[None]:
    """The rates of this machine are measured in a test of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "measure_bandwidth", lambda device, free: Bandwidth(2e9, 1e9))
        patch.setattr(session, "measure_matmul_rate", lambda device: 1e9)
        yield


@pytest.fixture(scope="package")
def measured(mtp_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file of a run of everything, on the CPU, of a bundle with a draft head."""
    file = tmp_path_factory.mktemp("bench") / "result.json"
    sizes = ("--prompt", "5,20", "--context", "20", "--drafts", "2")
    assert main([str(mtp_bundle), *QUICK, *sizes, "--json", str(file)]) == 0
    return json.loads(file.read_text())
