"""The engine's backend on a GPU beside the eager one, with the simulator in TensorRT's place.

What TensorRT would run is the engine's ONNX, by the ops' CUDA bodies or by their plugins' ``enqueue``, on the stream
and at the addresses that the backend gives, inside its CUDA graphs. So all of the backend is proven here but TensorRT.
"""

from __future__ import annotations

from pathlib import Path

import bundles
import pytest
import torch
from draft_head_steps import Rows, step_inputs
from on_gpu import LIMITS, PAGES, PROMPT, assert_close, bound_of, load_both, no_host_sync
from serving import generated, ids
from stub_tensorrt import StubTensorRT
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.builder import build as build_module
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend, engines_of
from qwen4exp_trt.runtime.load_options import CudaGraphs
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.sampler import SampleRequest, TokenHistory, greedy_operands
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo, its engines stand-ins."""
    target = "sm{}{}".format(*torch.cuda.get_device_capability())
    output = tmp_path_factory.mktemp(request.param) / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "_load_trt", lambda options: StubTensorRT())
        options = {"activation_dtype": request.param, "target": target, **LIMITS}
        return bundles.build_with_stand_in(bundles.DEMO_CHECKPOINT, output, **options)


@pytest.fixture(scope="module")
def eager(bundle: Path) -> EagerBackend:
    return load_both(bundle, "cuda:0")


def make_engines(bundle: Path, plugins: str = "body", graphs: CudaGraphs = CudaGraphs.OWN) -> TensorRTBackend:
    """Over weights and states of their own."""
    trt = SimulatedTensorRT(StubTensorRT(), bundle, plugins=plugins, device=torch.device("cuda", 0))
    return engines_of(trt, bundle, Manifest.load(bundle), load_both(bundle, "cuda:0"), graphs)


@pytest.fixture(scope="module")
def engines(bundle: Path) -> TensorRTBackend:
    return make_engines(bundle)


def steps() -> list[dict[str, torch.Tensor]]:
    """A prompt in two chunks, one beside decoding sequences, then captured steps of several shapes."""
    return [
        step_inputs(Rows(0, 0, PROMPT[:100]), pages=PAGES, num_logits=20),
        step_inputs(Rows(0, 100, PROMPT[100:]), Rows(1, 0, PROMPT[:9]), pages=PAGES, num_logits=5),
        *(step_inputs(Rows(0, 150 + place, [9 + place]), pages=PAGES) for place in range(3)),
        step_inputs(Rows(0, 153, [3, 4, 5]), Rows(1, 9, [7]), Rows(2, 0, [8, 9]), pages=PAGES),
        step_inputs(Rows(0, 154, [6]), Rows(1, 10, [7]), Rows(2, 1, [8]), pages=PAGES),
    ]


@pytest.mark.parametrize("plugins", ["body", "enqueue"])
def test_steps_of_the_model_are_those_of_its_program(bundle: Path, eager: EagerBackend, plugins: str) -> None:
    engines = make_engines(bundle, plugins)
    for inputs in steps():
        assert_close(eager.run_step(inputs), engines.run_step(inputs), bound_of(eager))
    assert engines._graphs is not None and len(engines._graphs.shapes) >= 2
    for name, state in eager.states.items():
        found = engines.states[name]
        if state.is_floating_point() and not name.startswith("mtp."):
            error = (found.float() - state.float()).norm() / state.float().norm().clamp(min=1e-20)
            assert error <= bound_of(eager), (name, float(error))
    engines.close()


def test_graphs_are_replayed_with_new_inputs(bundle: Path) -> None:
    """To the bit what the same padded steps give that are enqueued each time anew."""
    captured, enqueued = make_engines(bundle), make_engines(bundle, graphs=CudaGraphs.TENSORRT)
    requests = [SampleRequest(SamplingParams(temperature=0.9, top_p=0.9), TokenHistory([1]), seed) for seed in range(9)]
    for inputs in steps():
        count = len(inputs["logits_indices"])
        for _ in range(2):
            results = [each.run_step(inputs) for each in (captured, enqueued)]
            assert torch.equal(results[0].logits, results[1].logits)
        if count < len(requests):
            sampled = [each.sample_step(inputs, requests[:count], 400).tokens for each in (captured, enqueued)]
            assert sampled[0] == sampled[1]
        drawn = [each.draw_step(inputs, greedy_operands(count), None).drawn for each in (captured, enqueued)]
        assert torch.equal(*drawn)
    for name, state in captured.states.items():
        assert torch.equal(state.view(torch.uint8), enqueued.states[name].view(torch.uint8)), name


def test_a_captured_step_waits_for_nothing(engines: TensorRTBackend) -> None:
    inputs = step_inputs(Rows(0, 0, [5]), Rows(1, 0, [6]), pages=PAGES)
    operands = greedy_operands(2)
    engines.draw_step(inputs, operands, None)
    engines.run_step(inputs)
    with no_host_sync():
        for _ in range(3):
            engines.run_step(inputs)
            drawn = engines.draw_step(inputs, operands, None).drawn
    assert (drawn[0] >= 0).all()


def test_a_draft_head_takes_stacks_from_the_device(eager: EagerBackend, engines: TensorRTBackend) -> None:
    """Captured and not; a stack that begins at an odd row, and its own as the input of the next step."""
    heads = eager.draft, engines.draft
    assert heads[0] is not None and heads[1] is not None
    model = [each.run_step(steps()[0]) for each in (eager, engines)]
    assert_close(*model, bound_of(eager))
    for start, count in ((0, 60), (60, 20), (80, 3), (83, 1), (84, 1)):
        results = []
        for head, known in zip(heads, model, strict=True):
            assert head is not None and known.stack is not None
            rows = Rows(0, start, PROMPT[start + 1 : start + 1 + count], known.stack[start : start + count])
            results.append(head.run_step(step_inputs(rows, pages=PAGES, num_logits=min(count, 30))))
        assert_close(*results, bound_of(eager))


def test_what_an_engine_gives_stays(engines: TensorRTBackend) -> None:
    for inputs in (steps()[0], step_inputs(Rows(3, 0, [5]), pages=PAGES)):
        first = engines.run_step(inputs)
        kept = first.logits.clone()
        engines.run_step(step_inputs(Rows(3, 0, [9] * len(inputs["input_ids"])), pages=PAGES, num_logits=1))
        assert torch.equal(kept, first.logits)


@pytest.mark.parametrize("graphs", list(CudaGraphs))
def test_text_with_drafts_is_that_of_the_program(
    bundle: Path, graphs: CudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serving loop: prompts in chunks beside decoding, several requests, drafts of the head."""
    monkeypatch.setattr(
        "qwen4exp_trt.runtime.backend.load_trt",
        lambda name: SimulatedTensorRT(StubTensorRT(), bundle, device=torch.device("cuda", 0)),
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [ids(PROMPT[:length]) for length in (5, 150, 40)]
    texts = []
    for backend in ("eager", "tensorrt-rtx"):
        how = {} if backend == "eager" else {"cuda_graphs": str(graphs), "jit_cache": "none"}
        with LLM(bundle, backend, "cuda", speculate="mtp:3", num_blocks=64, **how) as llm:
            outputs = llm.generate(prompts, params)
            assert backend == "eager" or sum(output.metrics.num_accepted_tokens for output in outputs) > 0
        texts.append([generated(output) for output in outputs])
    if Manifest.load(bundle).activation_dtype == "float32":
        assert texts[0] == texts[1]
    else:  # a near tie of two tokens may fall to the other side
        assert [text[:2] for text in texts[0]] == [text[:2] for text in texts[1]]
