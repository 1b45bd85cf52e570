"""Nothing reaches TensorRT that is not as the program's tables and the profiles say: our own errors come first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draft_head_steps import Rows, step_inputs
from engine_bundles import CPU, decode, engine_backend, prompt
from torch import Tensor
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.aligned_memory import ALIGNMENT, aligned_empty
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.state_pool import allocate_states
from qwen4exp_trt.runtime.tensorrt.backend import allocate_outputs
from qwen4exp_trt.runtime.tensorrt.bindings import Bindings

pytestmark = [pytest.mark.trt, pytest.mark.eager("about engines")]

KV, SLOT, WEIGHT = "layers.1.self_attn.kv_cache", "layers.0.linear_attn.recurrent_state", "lm_head.weight"


@pytest.fixture
def tensors(engine_bundle: Path, loaded: EagerBackend) -> dict[str, Tensor]:
    """All that steps do not change."""
    manifest = Manifest.load(engine_bundle)
    states = allocate_states(loaded.program.states, 24, manifest.limits.num_slots, CPU)
    return {**states, **loaded.weights, **allocate_outputs(loaded.program.outputs, manifest, CPU)}


@pytest.fixture
def bind(engine_bundle: Path, loaded: EagerBackend) -> Callable[[dict[str, Tensor]], Bindings]:
    return lambda tensors: Bindings(loaded.program, tensors, Manifest.load(engine_bundle).profiles, CPU)


def test_every_tensor_of_the_tables_has_an_address(
    bind: Callable[[dict[str, Tensor]], Bindings], tensors: dict[str, Tensor], loaded: EagerBackend
) -> None:
    addresses = bind(tensors).addresses
    states = {spec.out_name: tensors[spec.name] for spec in loaded.program.states}
    assert addresses == {name: tensor.data_ptr() for name, tensor in {**tensors, **states}.items()}
    assert all(address % ALIGNMENT == 0 for address in addresses.values())


def moved(tensor: Tensor) -> Tensor:
    """A copy that begins one element behind an aligned address."""
    memory = aligned_empty((tensor.numel() + 1,), tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (
            WEIGHT,
            lambda weight: weight.float(),
            r"lm_head.weight is float32 \[384, 32\], expected bfloat16 \[",
        ),
        (WEIGHT, lambda weight: weight[:-1], r"lm_head.weight is bfloat16 \[383, 32\], expected bfloat16 \[384, "),
        (
            WEIGHT,
            lambda weight: weight.view(-1),
            r"lm_head.weight is bfloat16 \[12288\], expected bfloat16 \[384",
        ),
        (WEIGHT, lambda weight: weight.t().contiguous().t(), "lm_head.weight is not contiguous"),
        (WEIGHT, moved, r"lm_head.weight is at 0x\w+02, expected a multiple of 256"),
        (WEIGHT, lambda weight: weight.to("meta"), "lm_head.weight is on meta, expected cpu"),
        (KV, lambda state: state[:-1], r"index_k_cache is bfloat16 \[24, .*\], expected bfloat16 \[23, "),
        (SLOT, lambda state: state[:0], rf"{SLOT} is \[0, .*\], outside the profiles decode, prefill"),
        ("logits", lambda logits: logits[:, :-1].contiguous(), r"logits is .* expected \w+ \['any', 384\]"),
    ],
)
def test_a_tensor_that_is_not_as_it_should_be(
    bind: Callable[[dict[str, Tensor]], Bindings],
    tensors: dict[str, Tensor],
    name: str,
    change: Callable[[Tensor], Tensor],
    problem: str,
) -> None:
    tensors[name] = change(tensors[name])
    with pytest.raises(BundleError, match=f"the engine cannot be given its tensors: .*{problem}"):
        bind(tensors)


def test_memory_of_the_host_that_a_gpu_reads(
    bind: Callable[[dict[str, Tensor]], Bindings], tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory may be bound where other memory of another device may not; but some it must be."""
    tensors[WEIGHT] = tensors[WEIGHT].to("meta")
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    with pytest.raises(BundleError, match=f"the engine cannot be given its tensors: {WEIGHT} has no memory$"):
        bind(tensors)


def test_all_are_named_together(bind: Callable[[dict[str, Tensor]], Bindings], tensors: dict[str, Tensor]) -> None:
    del tensors[WEIGHT], tensors[SLOT]
    tensors[KV] = tensors[KV].float()
    with pytest.raises(BundleError) as error:
        bind(tensors)
    for problem in (f"{WEIGHT} is missing", f"{SLOT} is missing", f"{KV} is float32"):
        assert problem in str(error.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda inputs: inputs.pop("positions"), "a step lacks the inputs positions"),
        (
            lambda inputs: inputs.update(positions=inputs["positions"].long()),
            r"positions is int64 \[3, 20\], exp",
        ),
        (
            lambda inputs: inputs.update(positions=inputs["positions"][:, 1:]),
            r"is int32 \[3, 19\], expected int32 \[3",
        ),
        (
            lambda inputs: inputs.update(slot_ids=inputs["slot_ids"].repeat(2)),
            r"slot_ids is int32 \[2\], expected ",
        ),
    ],
)
def test_a_step_that_is_not_as_it_should_be(
    bind: Callable[[dict[str, Tensor]], Bindings],
    tensors: dict[str, Tensor],
    change: Callable[[dict[str, Tensor]], None],
    problem: str,
) -> None:
    inputs = {name: aligned_empty(value.shape, value.dtype).copy_(value) for name, value in prompt(20).items()}
    bindings = bind(tensors)
    assert bindings.check_step(inputs) == "decode"  # up to 8 tokens of each of three sequences
    change(inputs)
    with pytest.raises(BundleError, match=problem):
        bindings.check_step(inputs)


def test_steps_take_the_first_profile_that_holds_them(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend
) -> None:
    engine = engine_backend(trt, engine_bundle, loaded)
    for inputs, expected in ((prompt(24), (1, 0)), (prompt(25), (1, 1)), (decode(0), (2, 1)), (decode(0), (3, 1))):
        engine.run(inputs)
        # A captured step is also run once on padding.
        assert (trt.calls["decode"] > 0, trt.calls["prefill"]) == (expected[0] > 0, expected[1])
    with pytest.raises(BundleError, match=r"no profile of the engine \(decode, prefill\) holds a step of the shapes"):
        engine.run(prompt(33))
    with pytest.raises(BundleError, match="no profile of the engine"):
        engine.run(step_inputs(*(Rows(slot, 0, list(range(9))) for slot in range(2)), Rows(2, 0, [1]), Rows(0, 0, [1])))


def test_an_input_that_cannot_be_bound_is_copied(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that is on the device already, such as rows of a stack: they begin anywhere."""
    engine = engine_backend(trt, engine_bundle, loaded)
    inputs = prompt(20)
    expected = loaded.run(inputs)
    given = {name: moved(value) for name, value in inputs.items()}
    given["positions"] = given["positions"].t().contiguous().t()
    engine._execute(given)
    assert torch.equal(engine.outputs["logits"][:1].float(), expected)
