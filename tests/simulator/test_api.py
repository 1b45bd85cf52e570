"""What the simulator of TensorRT's runtime has of its API, and refuses of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_session import HandMadeSession, expect
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.runtime.tensorrt.log import make_log
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.eager("about the simulator, with errors on purpose")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.context.set_input_shape("input_ids", dims=(13,)), r"set_input_shape takes \(name, shape\)"),
        (lambda s: s.context.set_tensor_address("logits"), None),
        (lambda s: s.context.execute_async_v3(s.stream.handle, 1), r"execute_async_v3 takes \(stream_handle\), not"),
        (lambda s: s.engine.get_tensor_name(0, 1), r"get_tensor_name takes \(index\), not \(0, 1\)"),
        (
            lambda s: s.runtime.deserialize_cuda_engine(engine=b""),
            r"deserialize_cuda_engine takes \(serialized_engine\)",
        ),
    ],
)
def test_arguments_that_there_are_not(
    session: HandMadeSession, call: Callable[[HandMadeSession], Any], message: str | None
) -> None:
    with pytest.raises(TypeError) if message is None else expect(message):
        call(session)


def test_members_that_there_are_not(session: HandMadeSession) -> None:
    assert not hasattr(session.context, "execute_async_v4")
    assert hasattr(session.context, "execute_async_v3")
    with pytest.raises(AttributeError, match="TensorRT's ICudaEngine has no device_memory_size"):
        session.engine.device_memory_size  # noqa: B018
    with pytest.raises(AttributeError, match="TensorRT's IRuntimeConfig has no graphs"):
        session.engine.create_runtime_config().graphs = 1
    with expect("IExecutionContext.execute_v2 is not simulated"):
        session.context.execute_v2([])


def test_what_another_module_lacks(bundle: Path) -> None:
    lacks = {"IRuntimeCache", "CudaGraphStrategy", "IExecutionContext.is_stream_capturable"}
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle, lacks=lacks)
    session = HandMadeSession(trt)
    assert not hasattr(trt, "CudaGraphStrategy") and hasattr(trt, "TensorIOMode")
    assert not hasattr(session.context, "is_stream_capturable")
    assert session.execute().isfinite().all()


def test_a_refused_call_is_logged(session: HandMadeSession, trt: SimulatedTensorRT) -> None:
    trt.refusals["IExecutionContext.execute_async_v3"] = "out of resources"
    with session.stream.fork():
        assert session.enqueue() is False
    assert "out of resources" in trt.log.problems()
    assert session.execute().isfinite().all()


def test_an_engine_before_its_creators(trt: SimulatedTensorRT) -> None:
    runtime = trt.Runtime(make_log(trt))
    with expect("deserialized before the creators of Q4e.* are registered"):
        runtime.deserialize_cuda_engine(trt.engine_files[0].data)
    assert runtime.deserialize_cuda_engine(b"other") is None
    assert "not the serialized engine" in trt.log.problems()


def test_a_runtime_cache_is_of_one_version(session: HandMadeSession, trt: SimulatedTensorRT) -> None:
    config = session.engine.create_runtime_config()
    cache = config.create_runtime_cache()
    empty = bytes(cache.serialize())
    config.set_runtime_cache(cache)
    session.context = session.make_context(config=config)
    session.execute()
    data = bytes(cache.serialize())
    assert len(data) > len(empty) and cache.serialize().nbytes == len(data)
    assert config.create_runtime_cache().deserialize(data)
    trt.__version__ = "9.9"
    assert not config.create_runtime_cache().deserialize(data)


def test_the_inspector_tells_what_the_build_did(bundle: Path, trt: SimulatedTensorRT) -> None:
    session = HandMadeSession(trt)
    layer = {"name": "a", "type": "gemm", "inputs": [], "outputs": [], "modules": ["layers.0.mlp"]}
    trt.engine_files[0].layers["layers"] = [{**layer, "profile": name} for name in ("decode", "prefill")]
    inspector = session.engine.create_engine_inspector()
    inspector.execution_context = session.context
    told = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    assert [layer["Name"] for layer in told["Layers"]] == ["a", "a [profile 1]"]
    assert told["Layers"][0]["Metadata"] == "[ONNX Layer: layers.0.mlp]"
