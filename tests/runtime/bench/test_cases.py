from __future__ import annotations

from dataclasses import replace

import pytest

from qwen4exp_trt.runtime.bench.cases import (
    EFFORTS,
    Cases,
    DecodeCase,
    GenerateCase,
    PrefillCase,
    Room,
    Selection,
    StepKind,
    choose_cases,
    new_tokens,
)
from qwen4exp_trt.runtime.limits import EngineLimits

LIMITS = EngineLimits(max_batch_size=6, max_seq_len=65_536, prefill_chunk=2048, block_size=64)
ROOM = Room(LIMITS, LIMITS.max_num_blocks, LIMITS.max_batch_size, has_draft_head=False)
NOTHING = Selection(decode=False, prefill=False, generate=False)


def chosen(selection: Selection, effort: str = "default", room: Room = ROOM) -> Cases:
    return choose_cases(selection, EFFORTS[effort], room)


def reasons(cases: Cases) -> dict[str, str]:
    return {str(each.case): each.reason for each in cases.left_out}


def test_decode_batches_and_contexts() -> None:
    """Powers of two and the largest batch, each at the contexts that fit and at the longest that leaves room."""
    cases = chosen(replace(NOTHING, decode=True, drafts=()))
    longest = LIMITS.max_seq_len - new_tokens(EFFORTS["default"], 1)
    assert longest // LIMITS.block_size < LIMITS.blocks_per_seq - 1
    expected = [DecodeCase(batch, context) for batch in (1, 2, 4, 6) for context in (2048, 32_768, longest)]
    assert list(cases.cases) == expected
    assert set(reasons(cases)) == {f"decode of {batch} x 131,072 tokens" for batch in (1, 2, 4, 6)}


def test_what_is_left_out_says_why() -> None:
    cases = chosen(replace(NOTHING, decode=True, drafts=(), batches=(2,)), room=replace(ROOM, num_blocks=100))
    assert cases.cases == (DecodeCase(2, 2048),)
    found = reasons(cases)
    assert found["decode of 2 x 131,072 tokens"] == (
        "takes 131,145 tokens with those of its steps; the bundle is built for 65,536"
    )
    assert found["decode of 2 x 32,768 tokens"] == ("takes 1,028 pages of 64 tokens, and there is memory for 100")
    too_many = chosen(replace(NOTHING, decode=True, batches=(7,), contexts=(64,), drafts=(9,)))
    assert set(reasons(too_many).values()) == {"6 sequences run at a time, at most"}
    (reason,) = set(reasons(chosen(replace(NOTHING, decode=True, batches=(1,), contexts=(64,), drafts=(8,)))).values())
    assert reason == "a step verifies at most 7 drafts of a sequence"


@pytest.mark.parametrize("has_draft_head", [False, True])
def test_drafts_are_verified_and_proposed_if_there_is_a_head(has_draft_head: bool) -> None:
    selection = replace(NOTHING, decode=True, drafts=(0, 3), batches=(1, 4), contexts=(512, 64))
    cases = chosen(selection, room=replace(ROOM, has_draft_head=has_draft_head))
    with_drafts = [case for case in cases.cases if isinstance(case, DecodeCase) and case.drafts]
    kinds = [StepKind.VERIFY, StepKind.DRAFT] if has_draft_head else [StepKind.VERIFY]
    assert with_drafts == [DecodeCase(batch, 64, kind, 3) for batch in (1, 4) for kind in kinds]


def test_prompts_of_the_longest_sequence_only_in_full() -> None:
    selection = replace(NOTHING, prefill=True)
    assert chosen(selection).cases == tuple(map(PrefillCase, (512, 2048, 8192)))
    assert PrefillCase(LIMITS.max_seq_len - 1) in chosen(selection, "full").cases


def test_a_bundle_for_very_short_sequences_has_cases_too() -> None:
    limits = EngineLimits(max_batch_size=1, max_seq_len=64, prefill_chunk=8, block_size=8)
    effort = replace(EFFORTS["quick"], iterations=3, warm_up=3)
    cases = choose_cases(Selection(), effort, Room(limits, limits.max_num_blocks, 1, has_draft_head=True))
    kinds = [type(case) for case in cases.cases]
    assert kinds == [DecodeCase, DecodeCase, DecodeCase, GenerateCase, GenerateCase]
    assert {type(each.case) for each in cases.left_out} == {DecodeCase, PrefillCase}


def test_a_full_batch_of_the_longest_is_started_together() -> None:
    """A sequence begins only if a page is left for each that runs: the longest context leaves one of its own."""
    effort = replace(EFFORTS["quick"], iterations=2, warm_up=1)
    selection = replace(NOTHING, decode=True, drafts=(), batches=(6,))
    longest = choose_cases(selection, effort, ROOM).cases[-1]
    assert longest == DecodeCase(6, (LIMITS.blocks_per_seq - 1) * LIMITS.block_size - 1)
    full = replace(selection, contexts=(LIMITS.max_seq_len - 20,))
    (left_out,) = choose_cases(full, effort, ROOM).left_out
    assert left_out.reason == "takes 6,149 pages of 64 tokens, and there is memory for 6,144"


def test_every_case_that_is_chosen_fits() -> None:
    """With rows of drafts that were all accepted, and pages that are looked ahead to."""
    for name, effort in EFFORTS.items():
        for case in chosen(Selection(), name, replace(ROOM, has_draft_head=True)).cases:
            if isinstance(case, DecodeCase):
                steps = 1 + effort.warm_up + effort.iterations
                assert case.context + 1 + case.rows * steps + case.rows <= LIMITS.max_seq_len
            elif isinstance(case, GenerateCase):
                assert case.prompt + case.output <= LIMITS.max_seq_len
