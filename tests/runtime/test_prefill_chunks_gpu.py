"""A prompt in chunks gives on a GPU what it gives in one piece, wherever it is cut: logits, states and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import bundles
import pytest
import torch
from full_size_program import choose_formats
from released_model import BLOCK_SIZE, released_config
from torch import Tensor

from qwen4exp_trt.builder.compile import ExportOptions, transform_config
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.bench.random_weights import RandomWeights
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.specs import StateKind
from qwen4exp_trt.runtime.state_pool import allocate_states
from qwen4exp_trt.runtime.step_inputs import build_step_inputs

pytestmark = pytest.mark.gpu

UNEQUAL_STATES = (StateKind.DRAFT_ROWS, StateKind.COMMITTED_LEN)
"""What the last step left behind to take rows back depends on its length."""


@dataclass(frozen=True)
class Result:
    logits: Tensor
    states: dict[str, Tensor]


def prefill(backend: EagerBackend, token_ids: Sequence[int], chunks: Sequence[int], stride: int) -> Result:
    """Run ``token_ids`` in ``chunks`` from poisoned states, with the logits of every ``stride``-th token."""
    for state in backend.states.values():
        state.view(torch.uint8).fill_(255)  # NaN in every floating-point dtype
    core = EngineCore(backend, backend.limits, backend.limits.blocks_per_seq, 2**30, (), None)
    sequence = core.make_sequence(None, token_ids, SamplingParams(max_tokens=1))
    assert sum(chunks) == len(token_ids) and core.scheduler.acquire_memory(sequence)
    logits = []
    for chunk in chunks:
        inputs, _ = build_step_inputs([ScheduledSequence(sequence, chunk)])
        rows = [row for row in range(chunk) if (sequence.num_computed + row + 1) % stride == 0]
        inputs["logits_indices"] = torch.tensor(rows or [0], dtype=torch.int32)
        logits.append(backend.run(inputs)[: len(rows)].cpu())
        sequence.num_computed += chunk
    kinds = {spec.name: spec.kind for spec in backend.program.states}
    states = {name: state.cpu() for name, state in backend.states.items() if kinds[name] not in UNEQUAL_STATES}
    return Result(torch.cat(logits), states)


def errors(expected: Result, found: Result) -> dict[str, float]:
    """Of the logits, the worst of the states, and nan where what is written differs."""
    of_states = {name: error(state, found.states[name]) for name, state in expected.states.items()}
    worst = max(of_states, key=lambda name: of_states[name])
    return {"logits": error(expected.logits, found.logits), worst: of_states[worst]}


def error(expected: Tensor, found: Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, found) else float("inf")
    expected, found = expected.double(), found.double()
    if not torch.equal(expected.isnan(), found.isnan()):  # what no step has written
        return float("inf")
    return float((expected - found).nan_to_num().norm() / expected.nan_to_num().norm())


DEMO_TOKENS, DEMO_BUDGET = 1200, 96
DEMO_CUTS = {
    "inside a group and an n-gram": [33, 1, 2, 600, 564],
    "one before the budget": [DEMO_BUDGET - 1, 1105],
    "on the budget": [DEMO_BUDGET, 1104],
    "at the last token that sees all": [DEMO_BUDGET + 3, 1101],
    "behind it": [DEMO_BUDGET + 4, 1100],
    "many": [64] * 18 + [48],
}
DEMO_BOUNDS = {"float32": 1e-5, "bfloat16": 0.02}
TIE = 0.25
"""Nats between two tokens of which the one may come for the other: a few steps of BF16 logits."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    limits = {"max_batch_size": 2, "max_seq_len": 1280, "prefill_chunk": 1280, "block_size": 16}
    return LLM(
        bundles.build_for_gpu(tmp_path_factory.mktemp("demo") / "bundle", request.param, **limits), device="cuda"
    )


def demo_prompt(llm: LLM) -> list[int]:
    assert llm.tokenizer is not None
    text = bundles.HELDOUT_TEXT.read_text(encoding="utf-8")
    return llm.tokenizer.encode(text, add_special_tokens=False)[:DEMO_TOKENS]


def test_the_demo_in_chunks(demo: LLM) -> None:
    backend, token_ids = demo.core.backend, demo_prompt(demo)
    assert isinstance(backend, EagerBackend)
    bound = DEMO_BOUNDS[demo.manifest.activation_dtype]
    whole = prefill(backend, token_ids, [DEMO_TOKENS], stride=1)
    for name, chunks in DEMO_CUTS.items():
        found = errors(whole, prefill(backend, token_ids, chunks, stride=1))
        assert max(found.values()) <= bound, (name, found)


def test_the_text_behind_chunks_is_the_same(demo: LLM) -> None:
    """In BF16 up to where two tokens are as good as equal."""
    token_ids, outputs = demo_prompt(demo), []
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    for chunk in (1280, 514, 97):
        limits = replace(demo.manifest.limits, prefill_chunk=chunk)
        core = EngineCore(demo.core.backend, limits, limits.max_num_blocks, demo.core.vocab_size, (), None)
        sequence = core.make_sequence(None, token_ids, params)
        core.add(sequence)
        while sequence.finish_reason is None:
            core.step()
        outputs.append(sequence.request_output().outputs[0])
    whole, *cut = outputs
    assert len(whole.token_ids) == 32 and whole.logprobs is not None
    for output in cut:
        if output.token_ids == whole.token_ids:
            continue
        assert demo.manifest.activation_dtype == "bfloat16"
        place = next(i for i in range(32) if output.token_ids[i] != whole.token_ids[i])
        ranked = whole.logprobs[place]
        assert ranked[whole.token_ids[place]].logprob - ranked[output.token_ids[place]].logprob < TIE, place


RELEASED_TOKENS = 2700
RELEASED_CUTS = {
    "inside a group": [1023, 1677],
    "inside an n-gram": [1536, 1, 2, 580, 581],
    "one before the budget": [2047, 653],
    "on the budget": [2048, 652],
    "at the last token that sees all": [2051, 649],
    "behind it": [2052, 648],
}
RELEASED_BOUND = 0.01


def released_layers() -> ModelConfig:
    """Four layers of the released sizes, one with sparse attention and one with an n-gram table, of fewer rows."""
    config = released_config()
    layers = {"num_hidden_layers": 4, "layer_types": config.layer_types[:4], "num_experts": 64}
    return replace(config, **layers, ngram_vocab_size_base=20_000)


@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_released_sizes_in_chunks(precision: str) -> None:
    config = released_layers()
    program, _ = transform_config(
        config, ExportOptions("bfloat16", "auto", BLOCK_SIZE), choose_formats(config, precision, "nvfp4")
    )
    limits = EngineLimits(max_batch_size=1, max_seq_len=4096, prefill_chunk=4096, block_size=BLOCK_SIZE)
    device = torch.device("cuda", torch.cuda.current_device())
    states = allocate_states(program.states, limits.blocks_per_seq, limits.num_slots, device)
    backend = EagerBackend(program, states, RandomWeights().make_weights(program.weights, device), limits, device)
    token_ids = torch.randint(
        config.vocab_size, (RELEASED_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    whole = prefill(backend, token_ids, [RELEASED_TOKENS], stride=50)
    for name, chunks in RELEASED_CUTS.items():
        found = errors(whole, prefill(backend, token_ids, chunks, stride=50))
        assert max(found.values()) <= RELEASED_BOUND, (name, found)
