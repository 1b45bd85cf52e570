from __future__ import annotations

import torch

from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_memory import Memory
from qwen4exp_trt.runtime.step_inputs import build_step_inputs
from qwen4exp_trt.runtime.stopping import StopChecker


def make_sequence(token_ids: list[int], num_computed: int, slot: int, blocks: list[int]) -> Sequence:
    params = SamplingParams()
    sequence = Sequence("0", None, token_ids, params, 99, StopChecker(params, (), len(token_ids), 99), None)
    sequence.num_computed, sequence.memory = num_computed, Memory(slot, blocks)
    return sequence


DECODE = (make_sequence([10, 11, 12, 13, 14], 4, slot=2, blocks=[7, 3]), 1)
CHUNK = (make_sequence([20, 21, 22, 23, 24, 25], 2, slot=0, blocks=[5]), 3)
LAST_CHUNK = (make_sequence([30, 31, 32], 1, slot=5, blocks=[1, 2, 4]), 2)


def scheduled(*entries: tuple[Sequence, int]) -> list[ScheduledSequence]:
    return [ScheduledSequence(sequence, num_tokens) for sequence, num_tokens in entries]


def test_mixed_batch() -> None:
    inputs, sampled = build_step_inputs(scheduled(DECODE, CHUNK, LAST_CHUNK))
    assert {name: value.tolist() for name, value in inputs.items()} == {
        "input_ids": [14, 22, 23, 24, 31, 32],
        "positions": [[4, 2, 3, 4, 1, 2]] * 3,
        "query_start_loc": [0, 1, 4, 6],
        "seq_lens": [5, 5, 3],
        "slot_ids": [2, 0, 5],
        "block_table": [[7, 3, -1], [5, -1, -1], [1, 2, 4]],
        "num_seqs": [3],
        "logits_indices": [0, 5],
    }
    assert sampled == [0, 2], "the chunk in the middle of a prompt is not sampled"
    assert {value.dtype for value in inputs.values()} == {torch.int32}


def test_a_step_without_a_last_token_asks_for_row_0() -> None:
    inputs, sampled = build_step_inputs(scheduled(CHUNK))
    assert inputs["logits_indices"].tolist() == [0]
    assert sampled == []


def test_all_rows() -> None:
    inputs, _ = build_step_inputs(scheduled(CHUNK, LAST_CHUNK), all_rows=True)
    assert inputs["logits_indices"].tolist() == [0, 1, 2, 3, 4]


def test_one_token_alone() -> None:
    inputs, sampled = build_step_inputs(scheduled((make_sequence([9], 0, slot=0, blocks=[0]), 1)))
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "input_ids": (1,),
        "positions": (3, 1),
        "query_start_loc": (2,),
        "seq_lens": (1,),
        "slot_ids": (1,),
        "block_table": (1, 1),
        "num_seqs": (1,),
        "logits_indices": (1,),
    }
    assert sampled == [0]
