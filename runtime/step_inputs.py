"""The metadata tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import torch
from torch import Tensor

from qwen4exp_trt.runtime.scheduler import ScheduledSequence


def build_step_inputs(
    scheduled: SequenceOf[ScheduledSequence], all_rows: bool = False
) -> tuple[dict[str, Tensor], list[int]]:
    """Pack the scheduled tokens into the program's inputs (all int32).

    Returns the inputs and the indices of the sequences whose next token the step's logits give, row by row. With
    ``all_rows`` the logits are those of every token instead. A step that needs no logits asks for row 0, since a
    step always returns one.
    """
    token_ids, positions, tables, lens, rows = [], [], [], [], []
    for entry in scheduled:
        sequence, start = entry.sequence, entry.sequence.num_computed
        end = start + entry.num_tokens
        assert sequence.memory is not None, sequence.request_id
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        lens.append(end)
        tables.append(sequence.memory.blocks)
    starts = [0, *accumulate(entry.num_tokens for entry in scheduled)]
    sampled = [index for index, entry in enumerate(scheduled) if entry.samples]
    rows = list(range(starts[-1])) if all_rows else [starts[index + 1] - 1 for index in sampled]
    width = max(map(len, tables))
    inputs = {
        "input_ids": token_ids,
        "positions": [positions] * 3,  # text: all three MRoPE axes agree
        "query_start_loc": starts,
        "seq_lens": lens,
        "slot_ids": [entry.sequence.memory.slot for entry in scheduled if entry.sequence.memory],
        "block_table": [table + [-1] * (width - len(table)) for table in tables],
        "num_seqs": [len(scheduled)],
        "logits_indices": rows or [0],
    }
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in inputs.items()}, sampled
