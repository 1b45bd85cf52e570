"""The metadata tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.runtime.scheduler import ScheduledSequence


def build_step_inputs(
    scheduled: SequenceOf[ScheduledSequence], all_rows: bool = False
) -> tuple[dict[str, Tensor], list[int]]:
    """Pack the scheduled tokens into the program's inputs (all int32).

    Returns the inputs and the indices of the sequences whose next tokens the step's logits give, in the order of the
    rows: for each its last token and the drafts behind it. With ``all_rows`` the logits are those of every token
    instead. A step that needs no logits asks for row 0, since a step always returns one.
    """
    token_ids, positions, memories, lens = [], [], [], []
    for entry in scheduled:
        sequence, start = entry.sequence, entry.start
        end = start + entry.num_tokens
        assert sequence.memory is not None, sequence.request_id
        token_ids += sequence.token_ids[start:end]
        token_ids += sequence.draft_token_ids[: entry.num_drafts]
        positions.append(np.arange(start, end, dtype=np.int32))
        lens.append(end)
        memories.append(sequence.memory)
    starts = [0, *accumulate(entry.num_tokens for entry in scheduled)]
    sampled = [index for index, entry in enumerate(scheduled) if entry.samples]
    ends = [(starts[index + 1], scheduled[index].num_logits_rows) for index in sampled]
    rows = list(range(starts[-1])) if all_rows else [row for end, count in ends for row in range(end - count, end)]
    inputs = {
        "input_ids": token_ids,
        "positions": np.tile(np.concatenate(positions), (3, 1)),  # text: all three MRoPE axes agree
        "query_start_loc": starts,
        "seq_lens": lens,
        "slot_ids": [memory.slot for memory in memories],
        "num_seqs": [len(scheduled)],
        "logits_indices": rows or [0],
    }
    arrays = {name: np.array(value, dtype=np.int32) for name, value in inputs.items()}
    arrays["block_table"] = _block_table([memory.block_row for memory in memories])
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, sampled


def _block_table(rows: SequenceOf[np.ndarray]) -> np.ndarray:
    """Rows of pages, padded with -1."""
    table = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int32)
    for target, row in zip(table, rows, strict=True):
        target[: len(row)] = row
    return table
