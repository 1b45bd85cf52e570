"""The draft head against one that is wired from transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bundles import build
from draft_head_reference import DraftHeadReference
from draft_head_steps import Rows, reference_drafts, reference_stacks, run_pairs, step_inputs
from hf_parity import (
    REFERENCE_BOUND,
    SELF_BOUND,
    SMALL,
    VISIBLE,
    assert_logits_equal,
    check_bf16,
    load_reference,
    random_prompt,
    relative_error,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import build_draft_head, tiny_config_dict, write_hf_checkpoint
from torch import Tensor

from qwen4exp_trt.runtime.backend import EagerBackend, choose_backend, load_backend
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import Manifest

BUDGET, RATIO = 16, 4
LIMITS = {"max_batch_size": 4, "max_seq_len": 512, "prefill_chunk": 128, "block_size": 8}
PROMPT = random_prompt(61, seed=1, eos=(0, 7, 9, 10, 30))
"""Four times the indexer's budget."""


@dataclass(frozen=True)
class Drafting:
    """A transformers model with a draft head, and our runtime on a bundle of the same checkpoint."""

    reference: Any
    head: DraftHeadReference
    backend: EagerBackend
    checkpoint: Path

    @property
    def draft(self) -> EagerBackend:
        assert self.backend.draft is not None
        return self.backend.draft

    def pairs(self, token_ids: list[int]) -> tuple[list[int], Tensor, Tensor, Tensor]:
        """Of a prompt: the next ids, the model's stacks, and the logits and stacks that the reference makes of them."""
        _, stack = reference_stacks(self.reference, token_ids)
        logits, own = reference_drafts(self.reference, self.head, token_ids[1:], stack[:-1])
        return token_ids[1:], stack[:-1], logits, own


def make_drafting(folder: Path, dtype: str = "float32", **overrides: Any) -> Drafting:
    config = tiny_config_dict(**SMALL, mtp_num_hidden_layers=1, **overrides)
    write_hf_checkpoint(folder / "checkpoint", config, dtype=dtype)
    bundle = build(folder / "checkpoint", folder / "bundle", activation_dtype=dtype, backend="tensorrt-rtx", **LIMITS)
    options = LoadOptions(num_blocks=4 * 64, with_draft_head=True)
    manifest = Manifest.load(bundle)
    backend = load_backend(choose_backend("eager", None, bundle, manifest, options), bundle, manifest, options)
    assert isinstance(backend, EagerBackend)
    head = build_draft_head(config, dtype=dtype)
    return Drafting(load_reference(folder / "checkpoint", dtype), head, backend, folder / "checkpoint")


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    return make_drafting(tmp_path_factory.mktemp("drafting"))


def check(expected: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor], bound: float = REFERENCE_BOUND) -> None:
    """Logits and stacks."""
    assert_logits_equal(expected[0], got[0], bound)
    assert relative_error(expected[1], got[1]) <= bound


def test_the_model_hands_over_the_stack_behind_its_last_layer(drafting: Drafting) -> None:
    """Of every row, whichever logits are asked for."""
    logits, stack = reference_stacks(drafting.reference, PROMPT)
    inputs = step_inputs(Rows(0, 0, PROMPT))
    for rows in (torch.arange(len(PROMPT)), torch.tensor([60]), torch.tensor([7, 3])):
        result = drafting.backend.run_step({**inputs, "logits_indices": rows.int()})
        assert result.stack is not None
        check((logits[rows], stack), (result.logits, result.stack))


@pytest.mark.parametrize("length", [2, 4, 5, BUDGET, BUDGET + RATIO + 1, 61])
def test_pairs_of_a_prompt_equal_the_reference(drafting: Drafting, length: int) -> None:
    ids, stack, *expected = drafting.pairs(random_prompt(length, seed=length))
    check((expected[0], expected[1]), run_pairs(drafting.draft, Rows(1, 0, ids, stack)))


@pytest.mark.parametrize("wrong", ["norm a stream", "mixed stack", "token before", "position after", "stack after"])
def test_the_bound_sees_a_wrong_wiring(drafting: Drafting, wrong: str) -> None:
    """Trap 29: what draft heads were wired with by mistake is far from the reference."""
    ids, stack, expected, _ = drafting.pairs(PROMPT)
    config = drafting.head.layers[0].self_attn.config
    rows = Rows(0, 0, ids, stack)
    if wrong == "norm a stream":
        streams = stack.view(len(stack), config.hc_count, -1)
        scale = streams.pow(2).mean(-1, keepdim=True).rsqrt() / stack.pow(2).mean(-1, keepdim=True).rsqrt()[..., None]
        rows = Rows(0, 0, ids, (streams * scale).flatten(1))
    elif wrong == "mixed stack":
        with torch.no_grad():
            mixed = drafting.reference.model.hyper_connection_mixer(stack)
        rows = Rows(0, 0, ids, mixed.repeat(1, config.hc_count))
    elif wrong == "token before":
        rows = Rows(0, 0, PROMPT[:-1], stack)
    elif wrong == "stack after":
        rows = Rows(0, 0, ids, stack.roll(-1, 0))
    positions = torch.arange(1, len(PROMPT)).repeat(3, 1) * 2 if wrong == "position after" else None
    logits, _ = run_pairs(drafting.draft, rows, positions=positions)
    assert relative_error(expected, logits) > VISIBLE


def run_in_pieces(draft: EagerBackend, ids: list[int], stack: Tensor, sizes: list[int], slot: int = 0) -> Any:
    ends = list(accumulate(sizes))
    cuts = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    pieces = [run_pairs(draft, Rows(slot, start, ids[start:end], stack[start:end])) for start, end in cuts]
    return torch.cat([logits for logits, _ in pieces]), torch.cat([own for _, own in pieces])


@settings(max_examples=4, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, len(PROMPT) - 2), max_size=8))
def test_any_cut_equals_one_shot(drafting: Drafting, cuts: set[int]) -> None:
    ids, stack, *expected = drafting.pairs(PROMPT)
    bounds = [0, *sorted(cuts), len(ids)]
    sizes = [end - start for start, end in pairwise(bounds)]
    got = run_in_pieces(drafting.draft, ids, stack, sizes)
    check((expected[0], expected[1]), got)
    check(run_pairs(drafting.draft, Rows(2, 0, ids, stack)), got, SELF_BOUND)


def test_one_by_one_equals_one_shot(drafting: Drafting) -> None:
    ids, stack, *expected = drafting.pairs(PROMPT)
    check((expected[0], expected[1]), run_in_pieces(drafting.draft, ids, stack, [1] * len(ids)))


def test_sequences_of_a_batch_do_not_see_each_other(drafting: Drafting) -> None:
    """A prompt in chunks beside one that decodes and one that joins late, in slots and pages of their own."""
    prompts = [PROMPT, random_prompt(40, seed=5), random_prompt(23, seed=6)]
    pairs = [drafting.pairs(prompt) for prompt in prompts]
    ends = [(0, 20, 0), (7, 21, 0), (30, 24, 22), (60, 39, 22)]
    found: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    before = (0, 0, 0)
    for step in ends:
        active = [i for i in range(3) if step[i] > before[i]]
        rows = [Rows(i, before[i], pairs[i][0][before[i] : step[i]], pairs[i][1][before[i] : step[i]]) for i in active]
        results = run_pairs(drafting.draft, *rows)
        split = [result.split([len(part.ids) for part in rows]) for result in results]
        for index, logits, own in zip(active, *split, strict=True):
            found[index].append((logits, own))
        before = step
    for (_, _, *expected), parts in zip(pairs, found, strict=True):
        got = torch.cat([logits for logits, _ in parts]), torch.cat([own for _, own in parts])
        check((expected[0], expected[1]), got)


@pytest.mark.parametrize("length", [3, 19, 60])
def test_further_drafts_are_fed_by_the_own_stack(drafting: Drafting, length: int) -> None:
    """Each draft is the reference's on the same pairs and the own stacks of the drafts before."""
    ids, stack, *_ = drafting.pairs(PROMPT)
    known, tokens = stack[:length], ids[:length]
    logits, own = run_pairs(drafting.draft, Rows(0, 0, tokens, known))
    for place in range(length, length + 4):
        token = int(logits[-1].argmax())
        known, tokens = torch.cat([known, own[-1:]]), [*tokens, token]
        logits, own = run_pairs(drafting.draft, Rows(0, place, [token], own[-1:]))
        expected = reference_drafts(drafting.reference, drafting.head, tokens, known)
        check((expected[0][-1:], expected[1][-1:]), (logits, own))


@pytest.mark.parametrize("num_accepted", [0, 1, 3, DRAFT_ROWS - 1])
def test_rows_of_rejected_drafts_are_done_again(drafting: Drafting, num_accepted: int) -> None:
    """After drafts with the own stack, the true pairs of as many as were accepted, and one, lead to the true states."""
    start = 29
    ids, stack, *expected = drafting.pairs(PROMPT)
    logits, own = run_pairs(drafting.draft, Rows(3, 0, ids[:start], stack[:start]))
    for place in range(start, start + DRAFT_ROWS - 1):
        logits, own = run_pairs(drafting.draft, Rows(3, place, [int(logits[-1].argmax())], own[-1:]))
    end = start + num_accepted + 1
    run_pairs(drafting.draft, Rows(3, start, ids[start:end], stack[start:end]))
    check((expected[0][end:], expected[1][end:]), run_pairs(drafting.draft, Rows(3, end, ids[end:], stack[end:])))


def test_positions_of_three_axes(drafting: Drafting) -> None:
    text = torch.arange(len(PROMPT) - 1)
    positions = torch.stack([text // 2, text % 7 + text // 3, 40 - text // 2])
    ids, stack, *_ = drafting.pairs(PROMPT)
    expected = reference_drafts(drafting.reference, drafting.head, ids, stack, positions)
    check(expected, run_pairs(drafting.draft, Rows(0, 0, ids, stack), positions=positions))


def test_padding_changes_nothing(drafting: Drafting) -> None:
    ids, stack, *expected = drafting.pairs(PROMPT)
    inputs = step_inputs(Rows(1, 0, ids, stack), Rows(2, 0, [5, 6], stack[:2] * float("inf")))
    inputs["num_seqs"][0] = 1
    states = {name: state.clone() for name, state in drafting.draft.states.items()}
    result = drafting.draft.run_step({**inputs, "logits_indices": inputs["logits_indices"][: len(ids)]})
    assert result.stack is not None
    check((expected[0], expected[1]), (result.logits, result.stack))
    for name, state in drafting.draft.states.items():
        untouched = slice(2, 3) if state.shape[0] == LIMITS["max_batch_size"] else slice(2 * 64, 3 * 64)
        assert torch.equal(state[untouched], states[name][untouched]), name


@pytest.mark.slow
@pytest.mark.trt
def test_bf16_rounds_no_more_than_the_reference(tmp_path: Path) -> None:
    """Both on the exact model's stacks: see `check_bf16`."""
    ours = make_drafting(tmp_path, "bfloat16")
    exact = load_reference(ours.checkpoint, "float32")
    exact_head = DraftHeadReference(tiny_config_dict(**SMALL, mtp_num_hidden_layers=1)).eval()
    exact_head.load_state_dict({name: value.float() for name, value in ours.head.state_dict().items()})
    logits: list[list[Tensor]] = [[], [], []]
    for seed in range(6):
        prompt = random_prompt(60, seed=20 + seed)
        _, stack = reference_stacks(exact, prompt)
        rounded = stack[:-1].bfloat16()
        logits[0].append(reference_drafts(exact, exact_head, prompt[1:], rounded.float())[0])
        logits[1].append(reference_drafts(ours.reference, ours.head, prompt[1:], rounded)[0].float())
        logits[2].append(run_pairs(ours.draft, Rows(0, 0, prompt[1:], rounded))[0])
    check_bf16(*(torch.cat(rows) for rows in logits))
