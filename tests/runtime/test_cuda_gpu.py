"""The demo checkpoint on a GPU beside the CPU: text, logits, captured steps."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bundles
import pytest
import torch
from on_gpu import no_host_sync
from op_checks import equal_bits
from packed_steps import STEPS
from serving import assert_idle, generated, ids, observed_steps
from torch import Tensor

from qwen4exp_trt.errors import BundleError, DroppedError
from qwen4exp_trt.runtime import LLM, AsyncLLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.decode_graphs import DecodeGraphs
from qwen4exp_trt.runtime.packed_inputs import InputLayout, StagedInputs, StepShape, captured_shape
from qwen4exp_trt.runtime.sampler import SampleRequest, TokenHistory, sampling_operands

pytestmark = pytest.mark.gpu

PROMPTS = ("Once upon a time", "The little dog", "A", "In the morning, after the rain, ")
LIMITS = {"max_batch_size": 6, "max_seq_len": 256, "prefill_chunk": 64, "block_size": 16}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.build_for_gpu(tmp_path_factory.mktemp(request.param) / "bundle", request.param, **LIMITS)


@pytest.fixture(scope="module")
def on_cpu(bundle: Path) -> LLM:
    return LLM(bundle)


@pytest.fixture(scope="module")
def loaded(bundle: Path) -> LLM:
    return LLM(bundle, device="cuda")


@pytest.fixture
def on_gpu(loaded: LLM) -> Iterator[LLM]:
    yield loaded
    assert_idle(loaded)


def backend_of(llm: LLM) -> EagerBackend:
    assert isinstance(llm.core.backend, EagerBackend)
    return llm.core.backend


def graphs_of(llm: LLM) -> DecodeGraphs:
    graphs = backend_of(llm)._graphs
    assert graphs is not None
    return graphs


def heldout_tokens(llm: LLM, count: int) -> list[int]:
    """The first tokens of text that the model was not trained on."""
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(bundles.HELDOUT_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[:count]


def test_greedy_text_is_the_cpus(on_cpu: LLM, on_gpu: LLM) -> None:
    """Decoding passes the budget of the indexer, 96 tokens."""
    prompt, params = ids(heldout_tokens(on_cpu, 70)), greedy(40)
    expected, found = (llm.generate(prompt, params)[0].outputs[0] for llm in (on_cpu, on_gpu))
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text


def test_logits_are_the_cpus(on_cpu: LLM, on_gpu: LLM) -> None:
    token_ids = heldout_tokens(on_cpu, 200)
    expected, found = on_cpu.score(token_ids), on_gpu.score(token_ids).cpu()
    error = (expected - found).norm() / expected.norm()
    assert error < (1e-5 if on_cpu.manifest.activation_dtype == "float32" else 0.02)


def test_requests_in_one_batch_get_their_own_text(on_gpu: LLM) -> None:
    """Their steps are padded: from three sequences to four, and from five to six."""
    alone = [generated(on_gpu.generate(prompt, greedy(30))[0]) for prompt in PROMPTS]
    for count in (3, 4):
        together = [generated(output) for output in on_gpu.generate(list(PROMPTS[:count]), greedy(30))]
        if on_gpu.manifest.activation_dtype == "float32":
            assert together == alone[:count]
        else:
            assert [tokens[:5] for tokens in together] == [tokens[:5] for tokens in alone[:count]]


def test_async_streams_capture_and_replay_in_the_engines_thread(bundle: Path, on_gpu: LLM) -> None:
    expected = [generated(on_gpu.generate(prompt, greedy(20))[0]) for prompt in PROMPTS]

    async def main() -> list[list[int]]:
        async with AsyncLLM(bundle, device="cuda", max_num_seqs=1) as llm:
            gone = llm.generate(PROMPTS[0], greedy(100))
            await anext(gone)
            await gone.aclose()
            outputs = await asyncio.gather(*(llm.complete(prompt, greedy(20)) for prompt in PROMPTS))
        return [generated(output) for output in outputs]

    assert asyncio.run(main()) == expected, "one at a time: the same steps"


def test_a_damaged_weight_is_named_by_debug_nan(bundle: Path) -> None:
    llm = LLM(bundle, device="cuda", debug_nan=True)
    text = llm.generate(PROMPTS[0], greedy(8))[0].outputs[0].text
    assert text and llm.generate(PROMPTS[0], greedy(8))[0].outputs[0].text == text
    name = next(name for name in backend_of(llm).weights if name.startswith("layers.1.mlp.experts.down_proj"))
    backend_of(llm).weights[name].fill_(torch.nan)
    with pytest.raises(
        DroppedError, match=rf"is that of layers\.1\.mlp\.\S*moe, of whose weights {name} have such values"
    ):
        llm.generate(PROMPTS[1], greedy(8))


def record(llm: LLM, prompts: list[str], max_tokens: int) -> list[dict[str, Tensor]]:
    """The inputs of every step of serving ``prompts``."""
    with observed_steps(llm) as steps:
        llm.generate(prompts, greedy(max_tokens))
    return [{name: torch.tensor(value, dtype=torch.int32) for name, value in step.items()} for step in steps]


def test_a_captured_step_is_bitwise_the_same_step_run_op_by_op(on_gpu: LLM) -> None:
    backend, graphs = backend_of(on_gpu), graphs_of(on_gpu)
    results: list[list[Tensor]] = []
    for is_captured in (True, False):
        for state in backend.states.values():
            state.zero_()
        results.append([])
        for inputs in STEPS:
            shape = captured_shape(inputs, on_gpu.manifest.limits)
            assert shape is not None
            layout = InputLayout(backend.program.inputs, shape)
            buffer = layout.padding()
            StagedInputs(layout, buffer).pack(inputs)
            captured = graphs.run(inputs) if is_captured else backend._execute(layout.views(buffer.cuda()))
            assert captured is not None
            results[-1].append(captured["logits"][: len(inputs["logits_indices"])].clone())
        results[-1] += [state.clone() for state in backend.states.values()]
    assert all(equal_bits(*pair) for pair in zip(*results, strict=True))


def test_a_captured_step_is_the_cpus(on_cpu: LLM, on_gpu: LLM) -> None:
    """Also with several rows a sequence, and when a sequence joins."""
    for backend in (backend_of(on_cpu), backend_of(on_gpu)):
        for state in backend.states.values():
            state.zero_()
    tolerance = 1e-5 if on_cpu.manifest.activation_dtype == "float32" else 0.03
    for inputs in STEPS:
        expected, found = on_cpu.core.backend.run(inputs), on_gpu.core.backend.run(inputs).cpu()
        assert (expected - found).norm() < tolerance * expected.norm()


def test_a_captured_step_waits_for_nothing(on_gpu: LLM) -> None:
    steps = record(on_gpu, list(PROMPTS[:3]), 6)
    decode = steps[-1]
    assert decode["num_seqs"].tolist() == [3]
    requests = [SampleRequest(SamplingParams(top_p=0.9), TokenHistory([1]), seed) for seed in range(3)]
    steps_that_sample = backend_of(on_gpu)._graphs_that_sample(100)
    inputs = {**decode, **sampling_operands(requests)}
    graphs_of(on_gpu).run(decode)
    results = steps_that_sample.run(inputs)
    with no_host_sync():
        for _ in range(3):
            assert graphs_of(on_gpu).run(decode) is not None
            results = steps_that_sample.run(inputs)
            assert results is not None
    assert ((results["drawn"][0, :3] >= 0) & (results["drawn"][0, :3] < 100)).all()


def test_padding_reads_and_changes_no_state(on_gpu: LLM) -> None:
    backend = backend_of(on_gpu)
    params = greedy(20)
    expected = [generated(output) for output in on_gpu.generate(list(PROMPTS[:3]), params)]
    for state in backend.states.values():
        state.view(torch.uint8).fill_(255)  # NaN in every floating-point dtype, -1 in integers
    assert [generated(output) for output in on_gpu.generate(list(PROMPTS[:3]), params)] == expected
    before = {name: state.clone() for name, state in backend.states.items()}
    layout = InputLayout(backend.program.inputs, StepShape(4, 16, 16, on_gpu.manifest.limits.blocks_per_seq))
    backend._execute(layout.views(layout.padding().cuda()))
    assert all(equal_bits(state, before[name]) for name, state in backend.states.items())


def test_the_process_cannot_turn_on_tf32(on_gpu: LLM) -> None:
    token_ids = list(range(5, 90))
    expected = on_gpu.score(token_ids)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(on_gpu.score(token_ids), expected)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_sampling_on_the_gpu(on_gpu: LLM) -> None:
    """A seeded request samples the same beside others."""
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7, max_tokens=12, logprobs=2, ignore_eos=True)
    alone = on_gpu.generate(PROMPTS[0], params)[0].outputs[0]
    both = on_gpu.generate(list(PROMPTS[:2]), [params, greedy(12)])[0].outputs[0]
    if on_gpu.manifest.activation_dtype == "float32":
        assert both.token_ids == alone.token_ids
    assert alone.logprobs is not None and len(alone.logprobs) == 12


def test_the_command_uses_the_kernels_of_the_bundle(bundle: Path, on_cpu: LLM, tmp_path: Path) -> None:
    if on_cpu.manifest.activation_dtype == "float32":
        pytest.skip("once is enough")
    command = [sys.executable, "-m", "qwen4exp_trt.runtime", str(bundle), PROMPTS[0]]
    command += ["--max-tokens", "8", "--temperature", "0", "--device", "cuda"]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == on_cpu.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text + "\n"
    )
    assert not list(tmp_path.rglob("*.cubin"))


def test_more_memory_than_there_is(bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"too much for the memory of cuda:0, where [\d.,]+ GiB are available"):
        LLM(bundle, device="cuda", num_blocks=2**32)
    with pytest.raises(BundleError, match=r"device 'cuda:99': this machine has \d+ GPUs"):
        LLM(bundle, device="cuda:99")
