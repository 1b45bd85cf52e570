"""``pytest --engine simulated``: what tests load with the eager backend on the CPU runs on engines instead.

`TensorRTBackend` executes them over `trt_simulator`, on a stream that defers (`cpu_stream`). Tests stay as they are:
bundles that they build in float32 come with stand-ins for engines (`bundles.build_with_stand_in`), and others have
engines anyway. A test that is about the eager backend itself is marked ``eager(reason)`` and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bundles
import pytest
from cpu_stream import CpuStream
from trt_simulator import SimulatedTensorRT, violations

from qwen4exp_trt.runtime import llm
from qwen4exp_trt.runtime.backend import BackendChoice, engines_of, load_backend, load_eager_backend
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.program_backend import ProgramBackend
from qwen4exp_trt.runtime.tensorrt.module import load_trt

OPTION, CHOICES = "--engine", ("eager", "simulated")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, choices=CHOICES, default="eager", help="what runs a bundle that a test loads on the CPU")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "eager(reason): about the eager backend; left out by `--engine simulated`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(OPTION) != "simulated":
        return
    for item in items:
        if (marker := item.get_closest_marker("eager")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"eager backend only: {marker.args[0]}"))


@pytest.fixture(scope="session", autouse=True)
def _simulated_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the session, as bundles and models that tests share are made once."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption(OPTION) == "simulated":
            patch.setattr(bundles, "simulated_engines", True)
            patch.setattr(llm, "load_backend", load_simulated_backend)
        yield


@pytest.fixture(autouse=True)
def _no_violations(request: pytest.FixtureRequest) -> Iterator[None]:
    """A server or a dropped request makes an answer of any exception: the simulator's must not be among them."""
    violations.clear()
    yield
    if request.config.getoption(OPTION) == "simulated":
        assert not violations


def load_simulated_backend(
    choice: BackendChoice, folder: Path, manifest: Manifest, options: LoadOptions
) -> ProgramBackend:
    """As `load_backend`: engines in place of the eager backend on the CPU, but for `debug_nan`, which they lack."""
    if choice.name != "eager" or choice.device.type != "cpu" or options.debug_nan:
        return load_backend(choice, folder, manifest, options)
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), folder)
    loaded = load_eager_backend(folder, manifest, options, choice.device, runs_engine=True)
    return engines_of(trt, folder, manifest, loaded, options.graphs_on("cuda"), options.jit_cache, CpuStream)
