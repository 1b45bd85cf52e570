"""The simulator of TensorRT's runtime: each wrong use has a message of its own."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from cpu_stream import CpuStream
from simulated_session import HandMadeSession, aligned
from trt_simulator import SimulatedTensorRT, SimulatorError, violations

from qwen4exp_trt.runtime.aligned_memory import aligned_empty
from qwen4exp_trt.runtime.tensorrt.log import make_log
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.eager("about the simulator, with errors on purpose")
STATE = "layers.1.self_attn.kv_cache"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return bundles.build_with_stand_in(bundles.tiny_checkpoint(base / "tiny-checkpoint"), base / "stand-in")


@pytest.fixture
def trt(bundle: Path) -> SimulatedTensorRT:
    return SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle)


@pytest.fixture
def session(trt: SimulatedTensorRT) -> HandMadeSession:
    return HandMadeSession(trt)


def expect(message: str) -> Any:
    return pytest.raises(SimulatorError, match=message)


def test_executes_what_is_bound(session: HandMadeSession, trt: SimulatedTensorRT) -> None:
    before = {name: tensor.clone() for name, tensor in session.tensors.items()}
    logits = session.execute()
    operands = {name: before[name] for name in session.inputs}
    results = trt.program.run(operands)
    assert torch.equal(logits, results["logits"])
    assert torch.equal(session.tensors[STATE], results[f"{STATE}_out"])
    assert trt.calls == {"decode": 1, "prefill": 0}
    assert not violations


# --- what is bound ----------------------------------------------------------------------------------------------------


def test_a_tensor_without_address(session: HandMadeSession) -> None:
    context = session.make_context(None)
    context.set_optimization_profile_async(0, session.stream.handle)
    context.set_device_memory(session.memory.data_ptr(), session.memory.nbytes)
    for name, tensor in session.tensors.items():
        if name in session.step or name.startswith("layers."):
            context.set_tensor_address(name, tensor.data_ptr())
        if name in session.inputs and -1 in session.engine.get_tensor_shape(name):
            context.set_input_shape(name, tuple(tensor.shape))
    with expect("without address: .*, logits$"):
        session.enqueue(context)


def test_address_zero(session: HandMadeSession) -> None:
    with expect("logits is bound to the address 0"):
        session.context.set_tensor_address("logits", 0)


def test_a_misaligned_address(session: HandMadeSession) -> None:
    shifted = aligned_empty([99], torch.int32)[1:]
    with expect("input_ids is misaligned: .* not a multiple of 256 bytes"):
        session.context.set_tensor_address("input_ids", shifted.data_ptr())


def test_another_dtype(session: HandMadeSession) -> None:
    other = aligned(session.tensors["input_ids"]).view(torch.float32)
    with expect("wrong dtype: input_ids is torch.int32 in the engine, torch.float32 in memory"):
        session.context.set_tensor_address("input_ids", other.data_ptr())


def test_raw_bytes_are_memory_of_any_dtype(session: HandMadeSession) -> None:
    buffer = aligned_empty([512], torch.uint8)
    buffer[256:].view(torch.int32)[: len(session.step["input_ids"])] = session.step["input_ids"]
    session.context.set_tensor_address("input_ids", buffer.data_ptr() + 256)
    assert session.execute().isfinite().all()


def test_another_rank_in_the_call(session: HandMadeSession) -> None:
    with expect(r"wrong rank: input_ids \[1, 13\] has 2 dims, the engine's 1"):
        session.context.set_input_shape("input_ids", (1, 13))


def test_another_rank_in_memory(session: HandMadeSession) -> None:
    session.bind(session.context, positions=session.tensors["positions"])
    flat = aligned(session.tensors["positions"]).reshape(-1)
    session.context.set_tensor_address("positions", flat.data_ptr())
    with expect(r"wrong rank: positions is \[3, 13\], the tensor bound to it \[39\]"):
        session.enqueue()


def test_rows_of_another_length_in_memory(session: HandMadeSession) -> None:
    """A buffer for longer steps: TensorRT would read rows of the length that it was told."""
    wide = aligned_empty([3, 24], torch.int32).zero_()
    session.context.set_tensor_address("positions", wide.data_ptr())
    with expect(r"wrong shape: positions is \[3, 13\], the tensor bound to it \[3, 24\]"):
        session.enqueue()


def test_a_tensor_that_is_not_contiguous(session: HandMadeSession) -> None:
    transposed = aligned_empty([13, 3], torch.int32).zero_().T
    session.context.set_tensor_address("positions", transposed.data_ptr())
    with expect(r"positions is bound to a tensor \[3, 13\] that is not contiguous"):
        session.enqueue()


def test_memory_that_is_too_small(session: HandMadeSession) -> None:
    small = aligned_empty([13 * 384 * 4 - 300], torch.uint8)
    session.context.set_tensor_address("logits", small.data_ptr())
    with expect(r"logits needs 19968 bytes at .*, but the storage there has 19668 and ends 300 bytes earlier"):
        session.enqueue()


def test_memory_of_which_the_first_rows_were_asked_for(session: HandMadeSession) -> None:
    """Their address is that of the whole, which stays what it is."""
    address = session.tensors["logits"].data_ptr()
    assert session.tensors["logits"][:1].data_ptr() == address
    session.context.set_tensor_address("logits", address)
    assert session.execute().isfinite().all()


def test_an_address_of_nothing(session: HandMadeSession) -> None:
    with expect("logits is bound to 0x10000, which is in no live tensor"):
        session.context.set_tensor_address("logits", 1 << 16)


def test_an_unknown_tensor(session: HandMadeSession) -> None:
    for call in (
        lambda: session.context.set_tensor_address("logitz", session.memory.data_ptr()),
        lambda: session.context.set_input_shape("logitz", (1,)),
        lambda: session.context.get_tensor_address("logitz"),
        lambda: session.context.get_tensor_shape("logitz"),
        lambda: session.engine.get_tensor_shape("logitz"),
        lambda: session.engine.get_tensor_dtype("logitz"),
    ):
        with expect("the engine has no tensor 'logitz'"):
            call()


# --- shapes, profiles, memory -----------------------------------------------------------------------------------------


def test_a_shape_outside_the_profile(session: HandMadeSession) -> None:
    with expect(r"input_ids \[25\] is outside the profile decode: \[1\] to \[24\]"):
        session.context.set_input_shape("input_ids", (25,))


def test_a_shape_that_is_not_set(session: HandMadeSession) -> None:
    session.context.set_optimization_profile_async(1, session.stream.handle)
    session.context.set_input_shape("input_ids", (13,))
    assert "positions" in session.context.infer_shapes()
    with expect("no shape is set of positions, query_start_loc"):
        session.enqueue()


def test_two_extents_of_one_dim(session: HandMadeSession) -> None:
    session.context.set_input_shape("input_ids", (12,))
    with expect(r"positions \[3, 13\]: T is 12 in other inputs"):
        session.enqueue()


def test_the_shape_of_an_output(session: HandMadeSession) -> None:
    with expect("logits is an output: its shape cannot be set"):
        session.context.set_input_shape("logits", (13, 384))


def test_nothing_before_a_profile_is_selected(session: HandMadeSession) -> None:
    context = session.make_context(None)
    with expect("wrong order: the shape of input_ids before a profile is selected"):
        context.set_input_shape("input_ids", (13,))
    with expect("wrong order: device memory before a profile is selected"):
        context.set_device_memory(session.memory.data_ptr(), session.memory.nbytes)
    with expect("wrong order: execute_async_v3 before a profile is selected"):
        session.enqueue(context)


def test_an_unknown_profile(session: HandMadeSession) -> None:
    with expect("the engine has 2 profiles, none with the index 2"):
        session.context.set_optimization_profile_async(2, session.stream.handle)


def test_device_memory(session: HandMadeSession) -> None:
    context = session.make_context(None)
    context.set_optimization_profile_async(0, session.stream.handle)
    session.bind(context)
    with expect("no device memory is given"):
        session.enqueue(context)
    with expect("the device memory has 8 bytes, the profile needs 4096"):
        context.set_device_memory(session.memory.data_ptr(), 8)
    with expect("the device memory is misaligned"):
        context.set_device_memory(session.memory.data_ptr() + 8, 8192)
    with expect("the device memory is at the address 0"):
        context.set_device_memory(0, 8192)
    context.set_device_memory(session.memory.data_ptr(), 4096)
    context.set_optimization_profile_async(1, session.stream.handle)
    session.bind(context)
    with expect("the device memory is smaller than the selected profile needs"):
        session.enqueue(context)


def test_contexts_own_no_memory(session: HandMadeSession) -> None:
    with expect("simulated contexts are given their device memory"):
        session.engine.create_execution_context(session.trt.ExecutionContextAllocationStrategy.STATIC)


# --- aliases and overlaps ---------------------------------------------------------------------------------------------


def test_a_missing_alias(session: HandMadeSession) -> None:
    elsewhere = aligned(session.tensors[STATE])
    session.context.set_tensor_address(f"{STATE}_out", elsewhere.data_ptr())
    with expect(f"missing alias: {STATE}_out is not bound where {STATE} is"):
        session.enqueue()


def test_a_false_alias(session: HandMadeSession) -> None:
    """Two states at one place."""
    first, second = "layers.0.linear_attn.conv_state", "layers.0.linear_attn.recurrent_state"
    assert session.tensors[first].nbytes >= session.tensors[second].nbytes
    shared = session.tensors[first].reshape(-1)[: session.tensors[second].numel()].view(session.tensors[second].shape)
    session.bind(session.context, **{second: shared, f"{second}_out": shared})
    with expect("overlaps .*, and .* is written"):
        session.enqueue()


def test_an_output_over_an_input(session: HandMadeSession) -> None:
    weight = next(name for name in session.inputs if name.startswith("lm_head"))
    memory = aligned_empty([1 << 15], torch.float32).zero_()
    shape = session.tensors[weight].shape
    session.bind(
        session.context, **{weight: memory[: shape.numel()].view(shape), "logits": memory[: 13 * 384].view(13, 384)}
    )
    with expect("overlaps .*, and logits is written"):
        session.enqueue()


def test_device_memory_over_an_input(session: HandMadeSession) -> None:
    session.context.set_device_memory(session.tensors["lm_head.weight"].data_ptr(), 4096)
    with expect("the device memory is written"):
        session.enqueue()


# --- lifetimes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["input_ids", "logits", STATE])
def test_memory_that_was_freed(session: HandMadeSession, name: str) -> None:
    for each in [each for each, tensor in session.tensors.items() if tensor is session.tensors[name]]:
        if each != name:
            del session.tensors[each]
    del session.tensors[name]
    with expect(f"use after free: the memory of {name}(_out)? was freed after it was bound"):
        session.enqueue()


@pytest.mark.parametrize("name", ["input_ids", "logits", "the device memory"])
def test_memory_that_is_freed_before_it_is_used(session: HandMadeSession, name: str) -> None:
    with session.stream.fork():
        session.enqueue()
    if name in session.tensors:
        del session.tensors[name]
    else:
        del session.memory
    with expect(f"use after free: the memory of {name} was freed"):
        session.stream.join()


def test_memory_that_was_resized(session: HandMadeSession) -> None:
    memory = torch.empty(13 * 384 + 64)
    start = -memory.data_ptr() % 256 // 4
    session.bind(session.context, logits=memory[start : start + 13 * 384].view(13, 384))
    memory.untyped_storage().resize_(1 << 20)
    with expect("use after free: the memory of logits was resized after it was bound"):
        session.enqueue()


def test_device_memory_that_was_freed(session: HandMadeSession) -> None:
    del session.memory
    with expect("use after free: the memory of the device memory was freed"):
        session.enqueue()


def test_memory_of_a_graph_that_was_freed(session: HandMadeSession) -> None:
    session.execute()
    graph, _ = session.stream.capture(session.enqueue)
    graph.replay()
    del session.memory
    with expect("use after free: the memory of the device memory was freed"):
        graph.replay()


def test_the_engine_and_the_runtime_must_live(session: HandMadeSession) -> None:
    del session.runtime
    gc.collect()
    with expect("use after free: the runtime of this engine was deleted"):
        session.enqueue()
    del session.engine
    gc.collect()
    with expect("use after free: the engine of this context was deleted"):
        session.enqueue()


# --- order ------------------------------------------------------------------------------------------------------------


def test_results_are_there_when_the_stream_was_joined(session: HandMadeSession) -> None:
    state = session.tensors[STATE].clone()
    with session.stream.fork():
        session.enqueue()
    logits = session.tensors["logits"]
    assert logits.isnan().all() and torch.equal(session.tensors[STATE], state)
    session.stream.join()
    assert logits.isfinite().all() and not torch.equal(session.tensors[STATE], state)


def test_torch_ops_on_the_same_stream_see_results(session: HandMadeSession) -> None:
    with session.stream.fork():
        session.enqueue()
        copy = session.tensors["logits"].clone()
    assert copy.isfinite().all()


@pytest.mark.parametrize("name", ["input_ids", STATE, "lm_head.weight"])
def test_what_changes_before_it_is_read(session: HandMadeSession, name: str) -> None:
    with session.stream.fork():
        session.enqueue()
    session.tensors[name].view(-1)[0] += 1
    with expect(f"changed between enqueue and execution of decode: {name}"):
        session.stream.join()


def test_an_execution_behind_nothing(session: HandMadeSession) -> None:
    session.execute()
    with pytest.raises(Exception, match="wrong stream order: decode is enqueued outside of a fork"):
        session.enqueue()


def test_an_unknown_stream(session: HandMadeSession) -> None:
    with expect("there is no stream 0x0"):
        session.context.execute_async_v3(0)


def test_one_context_on_two_streams(session: HandMadeSession) -> None:
    other = CpuStream()
    with session.stream.fork(), other.fork():
        session.enqueue()
        with pytest.raises(Exception, match=r"wrong stream order: .* still uses the same execution context"):
            session.enqueue(stream=other)


def test_a_capture_of_what_was_never_executed(session: HandMadeSession) -> None:
    """What is compiled or allocated at a first execution cannot be while a graph is captured."""
    with expect("captured before decode was executed once with these shapes"):
        session.stream.capture(session.enqueue)
    session.execute()
    session.stream.capture(session.enqueue)


def test_a_capture_of_what_tensorrt_captures_itself(session: HandMadeSession) -> None:
    config = session.engine.create_runtime_config()
    config.cuda_graph_strategy = session.trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    session.context = session.make_context(config=config)
    session.execute()
    with expect("captured, while TensorRT makes the CUDA graphs of decode"):
        session.stream.capture(session.enqueue)


def test_two_contexts_in_one_memory_at_once(session: HandMadeSession) -> None:
    """One behind the other on one stream is right."""
    second, other = session.make_context(), CpuStream()
    with session.stream.fork(), other.fork():
        session.enqueue()
        session.enqueue(second)
        with pytest.raises(Exception, match=r"wrong stream order: decode is enqueued while decode on another stream"):
            session.enqueue(second, stream=other)
    session.stream.join()
    assert session.trt.calls["decode"] == 2


def test_two_engines_in_one_activation_memory_at_once(session: HandMadeSession, trt: SimulatedTensorRT) -> None:
    """All else of them is apart."""
    second = HandMadeSession(trt)
    second.context.set_device_memory(session.memory.data_ptr(), session.memory.nbytes)
    with session.stream.fork(), second.stream.fork():
        session.enqueue()
        with pytest.raises(Exception, match=r"wrong stream order: .* on another stream still uses the device memory"):
            second.enqueue()
        session.stream.synchronize()
        second.enqueue()
    second.stream.join()


# --- the API ----------------------------------------------------------------------------------------------------------


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
