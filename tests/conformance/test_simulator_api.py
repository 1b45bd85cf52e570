"""What stands for TensorRT's runtime in tests has TensorRT's members and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import tensorrt_api
from trt_api import Api
from trt_simulator import SimulatedTensorRT
from trt_simulator.api import Double

from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.trt


def doubles(cls: type = Double) -> Iterator[type[Double]]:
    for derived in cls.__subclasses__():
        if derived.__module__.startswith("trt_simulator."):
            yield derived
        yield from doubles(derived)


DOUBLES = sorted(set(doubles()), key=lambda cls: cls.stands_for)


@pytest.fixture(scope="module")
def rtx() -> Api:
    return Api(tensorrt_api.describe(load_trt("tensorrt-rtx")))


def problems(rtx: Api, double: type[Double]) -> list[str]:
    found = []
    for name, member in vars(double).items():
        if name.startswith("_") or name == "stands_for":
            continue
        kind, real = rtx.find(double.stands_for, name) or ("", None)
        if isinstance(member, property):
            if kind != "properties" or (member.fset and not real["settable"]):
                found.append(f"{name}: no property that can be {'set' if member.fset else 'read'}")
        elif kind != "methods":
            found.append(f"{name}: no method")
        else:
            own = list(inspect.signature(member).parameters)[1:]
            theirs = [[arg.partition(":")[0] for arg in overload["args"]] for overload in real]
            if own not in theirs and set(own) != {arg for args in theirs for arg in args}:
                found.append(f"{name}({', '.join(own)}): TensorRT's has {theirs}")
    return found


@pytest.mark.parametrize("double", [pytest.param(double, id=double.stands_for) for double in DOUBLES])
def test_a_double_has_what_its_class_has(rtx: Api, double: type[Double]) -> None:
    assert problems(rtx, double) == []


def test_every_class_of_the_runtime_has_a_double() -> None:
    names = {double.stands_for for double in DOUBLES}
    assert names >= {"Runtime", "ICudaEngine", "IExecutionContext", "IRuntimeConfig", "IRuntimeCache"}
    assert {"Runtime", "get_plugin_registry"} <= vars(SimulatedTensorRT).keys()


def test_what_a_double_has_too_much_is_found(rtx: Api) -> None:
    class Wrong(Double):
        stands_for = "IExecutionContext"

        def execute_async_v3(self, stream: int) -> bool: ...

        def execute_v1(self) -> bool: ...

        def name(self) -> str: ...

        @property
        def infer_shapes(self) -> int: ...

    assert [problem.split(":")[0] for problem in problems(rtx, Wrong)] == [
        "execute_async_v3(stream)",
        "execute_v1",
        "name",
        "infer_shapes",
    ]
