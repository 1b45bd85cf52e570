"""Bundles with a draft head: loaded, shared, executed by programs and by engines."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bundles import LIMITS, build, config_dict, write_text_files
from cpu_stream import CpuStream
from draft_head_steps import Rows, run_pairs, step_inputs
from hf_parity import SELF_BOUND, random_prompt, relative_error
from model_zoo import write_hf_checkpoint
from quantized_checkpoints import write_quantized
from serving import generated, ids
from torch import Tensor
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.builder import planning
from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend, engines_of, load_eager_backend
from qwen4exp_trt.runtime.bundle_programs import load_token_ids
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, Manifest
from qwen4exp_trt.runtime.memory_plan import plan_memory
from qwen4exp_trt.runtime.sampler import SampleRequest, TokenHistory, greedy_operands
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend
from qwen4exp_trt.runtime.tensorrt.engine_checks import check_engine_fits
from qwen4exp_trt.runtime.tensorrt.module import load_trt
from qwen4exp_trt.runtime.verify_command import parse_args, verify

pytestmark = pytest.mark.eager("compares both backends itself")
PAGES = 8
PROMPT = random_prompt(40, seed=1, vocab_size=300)
NUM_IDS = 48
HEAD: dict[str, Any] = {"mtp_num_hidden_layers": 1}


@pytest.fixture(scope="module", autouse=True)
def _no_estimate_of_activations() -> Iterator[None]:
    """It takes as long as the rest of a tiny build."""
    with patch.multiple(planning, estimate_activations=lambda *step: 0, estimate_workspace=lambda *step: 0):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafting") / "checkpoint"
    write_hf_checkpoint(folder, config_dict(**HEAD))
    write_text_files(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    """Float32, with a vocabulary of the head's own."""
    return build(checkpoint, checkpoint.parent / "bundle", draft_vocab_size=NUM_IDS)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Path:
    return build(checkpoint, checkpoint.parent / "whole")


@pytest.fixture(scope="module")
def without(checkpoint: Path) -> Path:
    return build(checkpoint, checkpoint.parent / "without", draft_head="none")


@pytest.fixture(scope="module")
def engine_bundle(checkpoint: Path) -> Path:
    return build(checkpoint, checkpoint.parent / "engines", activation_dtype="bfloat16", prefill_chunk=32)


def load(bundle: Path, with_draft_head: bool = True) -> EagerBackend:
    options = LoadOptions(num_blocks=PAGES * LIMITS["max_batch_size"], with_draft_head=with_draft_head)
    return load_eager_backend(bundle, Manifest.load(bundle), options, torch.device("cpu"))


def pairs_of(
    backend: EagerBackend | TensorRTBackend, prompt: list[int] = PROMPT, num_logits: int | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Runs pairs of the prompt, of which the model has been run: positions ``start`` up to ``end`` of a slot."""
    stack = backend.run_step(step_inputs(Rows(0, 0, prompt), pages=PAGES, num_logits=num_logits)).stack
    assert stack is not None and backend.draft is not None
    draft, known = backend.draft, stack

    def run(start: int, end: int, slot: int = 0) -> tuple[Tensor, Tensor]:
        rows = Rows(slot, start, prompt[1:][start:end], known[start:end])
        return run_pairs(draft, rows, pages=PAGES, num_logits=num_logits)

    return run


@pytest.mark.trt
def test_what_both_use_is_in_memory_once(bundle: Path, engine_bundle: Path) -> None:
    model = load(engine_bundle)
    head = model.draft
    assert head is not None and head.token_ids is None
    assert {spec.name for spec in model.program.weights} == model.weights.keys()
    shared = model.weights.keys() & head.weights.keys()
    assert {"embed_tokens.weight", "lm_head.weight", "inv_freq"} == shared
    assert all(model.weights[name].data_ptr() == head.weights[name].data_ptr() for name in shared)
    assert model.states.keys() >= head.states.keys() and len(head.states) == 4
    assert all(model.states[name].data_ptr() == state.data_ptr() for name, state in head.states.items())
    own = load(bundle)
    assert own.draft is not None and "lm_head.weight" not in own.draft.weights


@pytest.mark.slow
def test_a_smaller_vocabulary_has_the_logits_of_its_ids(bundle: Path, whole: Path) -> None:
    reduced = load(bundle)
    assert reduced.draft is not None and reduced.draft.token_ids is not None
    token_ids = reduced.draft.token_ids
    assert token_ids.dtype == torch.int64 and len(token_ids) == NUM_IDS
    assert token_ids.tolist() == sorted(set(token_ids.tolist()))
    (logits, stack), (all_logits, same_stack) = pairs_of(reduced)(0, 39), pairs_of(load(whole))(0, 39)
    assert logits.shape == (39, NUM_IDS)
    assert relative_error(all_logits[:, token_ids], logits) <= SELF_BOUND and torch.equal(stack, same_stack)


def test_a_bundle_can_be_loaded_without_its_draft_head(bundle: Path, without: Path) -> None:
    plain = load(bundle, with_draft_head=False)
    assert plain.draft is None and not any(name.startswith("mtp.") for name in (*plain.states, *plain.weights))
    assert plain.run_step(step_inputs(Rows(0, 0, PROMPT), pages=PAGES)).stack is not None
    assert Manifest.load(without).draft is None and not (without / "mtp").exists()
    assert load(without, with_draft_head=False).run_step(step_inputs(Rows(0, 0, PROMPT), pages=PAGES)).stack is None
    with pytest.raises(BundleError, match="has no draft head; build it from a checkpoint that has one"):
        load(without)


def test_memory_is_planned_with_the_draft_head(bundle: Path) -> None:
    backend, manifest = load(bundle), Manifest.load(bundle)
    assert backend.draft is not None
    programs = [backend.program, backend.draft.program]
    plans = [
        plan_memory(part, manifest, LoadOptions(num_blocks=10), torch.device("cpu"))
        for part in (programs[:1], programs)
    ]
    uses = [{use.name: use.num_bytes for use in plan.uses} for plan in plans]
    own = sum(w.nbytes for name, w in backend.draft.weights.items() if name not in backend.weights)
    assert uses[1]["weights"] - uses[0]["weights"] == own
    slots = sum(s.row_bytes for s in backend.draft.program.states if not s.is_paged) * manifest.limits.num_slots
    assert uses[1]["states of 3 sequences"] - uses[0]["states of 3 sequences"] == slots
    assert plans[1].page_bytes - plans[0].page_bytes == sum(
        s.row_bytes for s in backend.draft.program.states if s.is_paged
    )


@pytest.mark.parametrize(
    "damage",
    [lambda ids: ids[:-1], lambda ids: ids[::-1], lambda ids: [*ids[:-1], 384], lambda ids: [-1, *ids[1:]], str],
)
def test_damaged_token_ids_are_refused(bundle: Path, tmp_path: Path, damage: Callable[[list[int]], Any]) -> None:
    (tmp_path / "mtp").mkdir()
    token_ids = json.loads((bundle / "mtp" / "token_ids.json").read_text())
    (tmp_path / "mtp" / "token_ids.json").write_text(json.dumps(damage(token_ids)))
    with pytest.raises(BundleError, match=r"token_ids.json: not 48 ascending token ids below 384; build the bundle"):
        load_token_ids(tmp_path, Manifest.load(bundle))


@pytest.mark.slow
def test_experts_in_fp8_are_what_they_mean(tmp_path: Path) -> None:
    """The head of the FP8 release by the op that reads FP8, and with its experts dequantized."""
    write_quantized(tmp_path / "release", "FP8", config_dict(**HEAD))
    fp8, plain = (build(tmp_path / "release", tmp_path / p, precision=p) for p in ("checkpoint", "bf16"))
    rows = [row for row in Manifest.load(fp8).weights if row["component"] == "draft head experts"]
    assert [(row["stored"], row["held"]) for row in rows] == [("fp8 blocks", "fp8 blocks")]
    of_fp8, of_plain = load(fp8), load(plain)
    assert of_fp8.draft is not None and any("fp8_routed_moe" in str(n.target) for n in of_fp8.draft.program.calls())
    for expected, got in zip(pairs_of(of_plain)(0, 39), pairs_of(of_fp8)(0, 39), strict=True):
        assert relative_error(expected, got) <= 1e-4


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(engine_bundle: Path) -> tuple[EagerBackend, TensorRTBackend, SimulatedTensorRT]:
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), engine_bundle)
    engines = engines_of(trt, engine_bundle, Manifest.load(engine_bundle), load(engine_bundle), make_stream=CpuStream)
    return load(engine_bundle), engines, trt


@pytest.mark.trt
def test_engines_give_what_the_programs_do(both: tuple[EagerBackend, TensorRTBackend, SimulatedTensorRT]) -> None:
    """Prompts and drafts, in both profiles of both engines; states to the bit."""
    eager, engines, trt = both
    assert isinstance(engines.draft, TensorRTBackend) and engines.draft.trt is trt
    for prompt in (PROMPT[:30], PROMPT[:2]):
        runs = [pairs_of(backend, prompt, num_logits=5) for backend in (eager, engines)]
        end = len(prompt) - 1
        for start, stop in ((0, end - 1), (end - 1, end)):
            if stop == start:
                continue
            for expected, got in zip(*(run(start, stop) for run in runs), strict=True):
                assert torch.equal(expected, got)
    assert all(trt.calls.values()), trt.calls
    for name, state in eager.states.items():
        assert torch.equal(state, engines.states[name]), name
    assert engines.session.activations.data_ptr() == engines.draft.session.activations.data_ptr()


@pytest.mark.trt
def test_results_of_an_engine_stay(both: tuple[EagerBackend, TensorRTBackend, SimulatedTensorRT]) -> None:
    """Also of a step that is too long to be captured, and the stack of one that is sampled."""
    engines = both[1]
    run = pairs_of(engines, PROMPT[:24])
    inputs = step_inputs(Rows(0, 0, PROMPT[:8]), pages=PAGES, num_logits=1)
    request = SampleRequest(SamplingParams(temperature=0.0), TokenHistory(PROMPT[:8]), seed=0)
    found = [*run(0, 8), *run(8, 20), *run(0, 12), engines.sample_step(inputs, [request], None).stack]
    kept = [value.clone() for value in found if value is not None]
    pairs_of(engines, PROMPT[8:16])(0, 7)
    assert len(kept) == 7 and all(map(torch.equal, kept, found))


@pytest.mark.trt
def test_a_draft_goes_on_from_the_stack_of_the_last_step(
    both: tuple[EagerBackend, TensorRTBackend, SimulatedTensorRT],
) -> None:
    """It is still where the engine has written it, and the next step is the first of its shape."""
    results = []
    for backend in both[:2]:
        head, vocab_limit = backend.draft, 300  # no other test's: steps that draw below it are new
        model = backend.run_step(step_inputs(Rows(0, 0, PROMPT[:9]), pages=PAGES))
        assert head is not None and model.stack is not None
        stack = model.stack[:7]
        for rows in (Rows(0, 0, PROMPT[1:8]), Rows(0, 7, [7])):
            inputs = {**step_inputs(rows, pages=PAGES), "stack": stack}
            step = head.draw_step(inputs, greedy_operands(len(rows.ids)), vocab_limit)
            results.append((step.drawn.clone(), step.logits.float().clone()))
            assert step.stack is not None
            stack = step.stack[:1]
    for expected, got in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, expected, got))


@pytest.mark.trt
def test_a_sampled_step_gives_the_stack_too(both: tuple[EagerBackend, TensorRTBackend, SimulatedTensorRT]) -> None:
    inputs = step_inputs(Rows(0, 0, PROMPT[:9]), pages=PAGES)
    request = SampleRequest(SamplingParams(temperature=0.0), TokenHistory(PROMPT[:9]), seed=0)
    last = {**inputs, "logits_indices": inputs["logits_indices"][-1:]}
    for backend in both[:2]:
        expected, step = backend.run_step(inputs), backend.sample_step(last, [request], None)
        assert expected.stack is not None and step.stack is not None and torch.equal(step.stack, expected.stack)
        assert step.tokens[0] is not None and step.tokens[0].token_id == int(expected.logits[-1].argmax())


def test_a_draft_head_changes_no_text(bundle: Path, without: Path) -> None:
    """The model of a bundle with a draft head generates what it does in a bundle without."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [
        [generated(output) for output in LLM(path).generate([ids(PROMPT), ids(PROMPT[:3])], params)]
        for path in (bundle, without)
    ]
    assert texts[0] == texts[1]


def verify_bundle(bundle: Path, trt: SimulatedTensorRT, **values: Any) -> None:
    args = parse_args([str(bundle), "--device", "cpu"])
    verify(argparse.Namespace(**{**vars(args), **values}), trt, CpuStream)


@pytest.mark.trt
def test_a_damaged_engine_of_the_draft_head(engine_bundle: Path, tmp_path: Path) -> None:
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), engine_bundle)
    copy = Path(shutil.copytree(engine_bundle, tmp_path / "copy"))
    path = copy / DRAFT_DIR / ENGINE_FILE
    path.write_bytes(b"another")
    with pytest.raises(BundleError, match=f"{path}: its sha256 is .* it is damaged, or another engine was put in its"):
        check_engine_fits(trt, copy, Manifest.load(copy), torch.device("cpu"))


@pytest.mark.trt
def test_verify_compares_the_draft_head_too(engine_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), engine_bundle)
    verify_bundle(engine_bundle, trt, tolerance=1e-6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("the engines of the model and its draft head agree with theirs within 1e-06 on ")
    assert all("largest error 0.00e+00 of " in line for line in lines[:-1])
    assert trt.calls["mtp/prefill"] and trt.calls["mtp/decode"]


@pytest.mark.trt
def test_verify_names_what_of_the_draft_head_differs(engine_bundle: Path) -> None:
    """The head's engine damaged, while the model's is right."""
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), engine_bundle)
    assert len(trt.engine_files) == 2
    run = trt.engine_files[1].program._run_node

    def damaged(node: Any, operands: list[Tensor]) -> Any:
        outputs = run(node, operands)
        if node.name == "mtp.fc_hidden.linear":
            (outputs[0] if isinstance(outputs, list) else outputs).mul_(1.5)
        return outputs

    trt.engine_files[1].program._run_node = damaged  # type: ignore[method-assign]
    with pytest.raises(BundleError, match=r"the engine gives another mtp\.layers\.0\.self_attn\.kv_cache than"):
        verify_bundle(engine_bundle, trt)


@pytest.mark.trt
def test_engines_draft_what_the_programs_do(engine_bundle: Path) -> None:
    """The serving loop with both engines: the same text by the same drafts, greedy and sampled."""
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), engine_bundle)
    outcomes = []
    for has_engines in (False, True):
        llm = LLM(engine_bundle, speculate="mtp:3")
        if has_engines:
            assert isinstance(llm.core.backend, EagerBackend) and llm.core.drafting is not None
            engines = engines_of(trt, engine_bundle, llm.manifest, llm.core.backend, make_stream=CpuStream)
            llm.core.backend = engines
            llm.core.drafting.proposer._head = engines.draft  # pyright: ignore[reportAttributeAccessIssue]
        params = [
            SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
            SamplingParams(temperature=3.0, seed=1, max_tokens=10, ignore_eos=True),
        ]
        outputs = llm.generate([{"prompt_token_ids": PROMPT[:9]}] * 2, params)
        drafted = [output.metrics.num_draft_tokens for output in outputs]
        accepted = [output.metrics.num_accepted_tokens for output in outputs]
        assert all(drafted)
        outcomes.append(([output.outputs[0].token_ids for output in outputs], drafted, accepted))
        llm.core.backend.close()
    assert engines.session.engine is None and engines.draft is not None and engines.draft.session.engine is None
    assert outcomes[0] == outcomes[1]
