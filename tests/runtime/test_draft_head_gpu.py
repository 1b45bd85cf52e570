"""A draft head on a GPU beside the CPU: whole prompts, captured steps, stacks that stay on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bundles
import pytest
import torch
from draft_head_steps import Rows, step_inputs
from on_gpu import LIMITS, PAGES, PROMPT, assert_close, bound_of, load_both
from torch import Tensor

from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.sampler import SampleRequest, TokenHistory
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.step_result import StepResult

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.build_for_gpu(tmp_path_factory.mktemp(request.param) / "bundle", request.param, **LIMITS)


@pytest.fixture(scope="module")
def backends(bundle: Path) -> tuple[EagerBackend, EagerBackend]:
    """On the CPU and on the GPU."""
    return load_both(bundle, "cpu"), load_both(bundle, "cuda")


def draft_of(backend: EagerBackend) -> EagerBackend:
    assert backend.draft is not None
    return backend.draft


def stack_of(result: StepResult) -> Tensor:
    assert result.stack is not None
    return result.stack


def run(backend: EagerBackend, *rows: Rows) -> StepResult:
    return backend.run_step(step_inputs(*rows, pages=PAGES))


def test_a_prompt_and_drafts_are_those_of_the_cpu(backends: tuple[EagerBackend, EagerBackend]) -> None:
    """A prompt op by op, then captured steps: pairs with the model's stacks, and drafts fed by the head's own."""
    cpu, gpu = backends
    bound, length = bound_of(cpu), len(PROMPT) - 1
    model = [run(backend, Rows(0, 0, PROMPT)) for backend in backends]
    assert_close(*model, bound)
    stacks = stack_of(model[0])[:-1], stack_of(model[1])[:-1]
    assert stacks[1].is_cuda
    pairs = [run(draft_of(b), Rows(0, 0, PROMPT[1:], stack)) for b, stack in zip(backends, stacks, strict=True)]
    assert_close(*pairs, bound)
    for place in range(length, length + 4):
        token = int(pairs[0].logits[-1].argmax())
        rows = [Rows(0, place, [token], stack_of(result)[-1:]) for result in pairs]
        pairs = [run(draft_of(b), row) for b, row in zip(backends, rows, strict=True)]
        assert_close(*pairs, bound)
    # Three sequences with other numbers of rows, in one captured step.
    rows = [
        Rows(0, length, PROMPT[:2], stacks[0][:2]),
        Rows(1, 0, PROMPT[:4], stacks[0][:4]),
        Rows(2, 0, [7], stacks[0][:1]),
    ]
    on_gpu = [replace(row, stack=row.stack.cuda()) for row in rows if row.stack is not None]
    assert_close(run(draft_of(cpu), *rows), run(draft_of(gpu), *on_gpu), bound)


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_stacks_on_the_device_are_those_from_the_host(backends: tuple[EagerBackend, EagerBackend], count: int) -> None:
    """Copied on the GPU or packed on the CPU, to the same bits; results stay when later steps run."""
    head = draft_of(backends[1])
    stack = torch.randn(count, head.program.inputs[-1].shape[1], generator=torch.Generator().manual_seed(1))  # type: ignore[call-overload]
    stack = stack.to(getattr(torch, head.program.inputs[-1].dtype))
    packed, copied = (run(head, Rows(3, 0, PROMPT[:count], each)) for each in (stack, stack.cuda()))
    kept = copied.logits.clone(), stack_of(copied).clone()
    run(head, Rows(3, 0, PROMPT[:count], -stack))
    assert torch.equal(packed.logits, copied.logits) and torch.equal(stack_of(packed), stack_of(copied))
    assert torch.equal(kept[0], copied.logits) and torch.equal(kept[1], stack_of(copied))


def test_ids_may_be_on_the_device(backends: tuple[EagerBackend, EagerBackend]) -> None:
    """What one draft proposes is the input of the next without a way over the host."""
    head = draft_of(backends[1])
    stack = stack_of(run(backends[1], Rows(0, 0, PROMPT[:5])))
    rows = Rows(0, 0, PROMPT[1:6], stack), Rows(1, 0, PROMPT[3:6], stack[:3])
    inputs = step_inputs(*rows, pages=PAGES)
    expected = head.run_step(inputs)
    got = head.run_step({**inputs, "input_ids": inputs["input_ids"].cuda()})
    assert torch.equal(expected.logits, got.logits) and torch.equal(stack_of(expected), stack_of(got))


def test_a_sampled_step_gives_the_stack_too(backends: tuple[EagerBackend, EagerBackend]) -> None:
    model = backends[1]
    request = SampleRequest(SamplingParams(temperature=0.0), TokenHistory(PROMPT[:9]), seed=0)
    for count in (5, 40):  # captured, and op by op
        inputs = step_inputs(Rows(0, 0, PROMPT[:count]), pages=PAGES)
        expected = model.run_step(inputs)
        inputs["logits_indices"] = inputs["logits_indices"][-1:].clone()
        step = model.sample_step(inputs, [request], None)
        assert step.stack is not None and step.stack.shape[0] == count
        assert torch.equal(step.stack, stack_of(expected))
        assert step.tokens[0] is not None
        assert step.tokens[0].token_id == int(expected.logits[-1].argmax())
