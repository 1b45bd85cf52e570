"""What the simulator of TensorRT's runtime says of addresses, shapes and aliases: each wrong use has a message."""

from __future__ import annotations

import pytest
import torch
from simulated_session import HandMadeSession, aligned, expect
from trt_simulator import SimulatedTensorRT, violations

from qwen4exp_trt.runtime.aligned_memory import aligned_empty

pytestmark = pytest.mark.eager("about the simulator, with errors on purpose")
STATE = "layers.1.self_attn.kv_cache"


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
