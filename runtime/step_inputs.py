"""The metadata tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qwen4exp_trt.runtime.scheduler import ScheduledSequence


def build_step_inputs(
    scheduled: SequenceOf[ScheduledSequence], all_rows: bool = False
) -> tuple[dict[str, Tensor], list[int]]:
    """Pack the scheduled tokens into the program's inputs (all int32).

    Returns the inputs and the indices of the sequences whose next token the step's logits give, row by row. With
    ``all_rows`` the logits are those of every token instead. A step that needs no logits asks for row 0, since a
    step always returns one.
    """
    token_ids, positions, memories, lens = [], [], [], []
    for entry in scheduled:
        sequence, start = entry.sequence, entry.sequence.num_computed
        end = start + entry.num_tokens
        assert sequence.memory is not None, sequence.request_id
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        lens.append(end)
        memories.append(sequence.memory)
    starts = [0, *accumulate(entry.num_tokens for entry in scheduled)]
    sampled = [index for index, entry in enumerate(scheduled) if entry.samples]
    rows = list(range(starts[-1])) if all_rows else [starts[index + 1] - 1 for index in sampled]
    inputs = {
        "input_ids": token_ids,
        "positions": [positions] * 3,  # text: all three MRoPE axes agree
        "query_start_loc": starts,
        "seq_lens": lens,
        "slot_ids": [memory.slot for memory in memories],
        "num_seqs": [len(scheduled)],
        "logits_indices": rows or [0],
    }
    tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in inputs.items()}
    rows_of_blocks = [memory.block_row for memory in memories]
    tensors["block_table"] = pad_sequence(rows_of_blocks, batch_first=True, padding_value=-1)
    return tensors, sampled
