from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from simulated_engines import load_simulated_backend
from trt_simulator import violations

from qwen4exp_trt.runtime import llm
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


def run_over_the_simulator(bundle: Path, file: Path) -> None:
    """Measure everything, with engines that the simulator executes, of which ``file`` then tells."""
    sizes = ("--batch", "2", "--prompt", "5,20", "--context", "20", "--drafts", "2")
    more = ("--iterations", "2", "--seconds", "0.1", "--check", "--json", str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(file.parent / "cache"))
        patch.setattr(llm, "load_backend", load_simulated_backend)
        patch.setattr(session, "check_can_compare", lambda backend, device: None)
        assert main([str(bundle), *QUICK, *sizes, *more]) == 0
    assert not violations
