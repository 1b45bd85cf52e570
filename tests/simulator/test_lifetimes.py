"""What the simulator of TensorRT's runtime says of freed memory, and of what runs in a wrong order."""

from __future__ import annotations

import gc

import pytest
import torch
from cpu_stream import CpuStream
from simulated_session import HandMadeSession, expect
from trt_simulator import SimulatedTensorRT

pytestmark = pytest.mark.eager("about the simulator, with errors on purpose")
STATE = "layers.1.self_attn.kv_cache"


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
