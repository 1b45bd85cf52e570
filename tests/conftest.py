"""What every test runs under: a fixed seed, one thread, a time limit, and NaN in memory that nobody wrote."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from released_model import ReleasedExport, export_released
from torch._subclasses import FakeTensor

pytest_plugins = ["simulated_engines"]

TIME_LIMIT_S = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden instead of comparing with it")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several workers share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("time_limit")
    seconds = TIME_LIMIT_S if marker is None else marker.args[0]

    def fail(*_: Any) -> None:
        pytest.fail(f"{request.node.name} ran for more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True)
def _nan_in_unwritten_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float tensors that our package gets from `torch.empty` are full of NaN: a read before a write shows at once.

    FP4 has no NaN and cannot be filled.
    """
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _filled_with_nan(getattr(torch, name)))


def _filled_with_nan(allocate: Any) -> Any:
    def allocate_filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals["__name__"]
        is_real = not isinstance(tensor, FakeTensor) and not tensor.is_meta
        has_nan = tensor.is_floating_point() and tensor.dtype != torch.float4_e2m1fn_x2
        if caller.startswith("qwen4exp_trt.") and is_real and has_nan:
            tensor.fill_(torch.nan)
        return tensor

    return allocate_filled


@pytest.fixture(scope="session")
def released_export() -> ReleasedExport:
    """The released model, exported once."""
    return export_released()
