"""The metadata tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence_memory import Memory


def build_step_inputs(
    scheduled: SequenceOf[ScheduledSequence], all_rows: bool = False
) -> tuple[dict[str, Tensor], list[int]]:
    """Pack the scheduled tokens into the program's inputs (all int32).

    Returns the inputs and the indices of the sequences whose next tokens the step's logits give, in the order of the
    rows: for each its last token and the drafts behind it. With ``all_rows`` the logits are those of every token
    instead. A step that needs no logits asks for row 0, since a step always returns one.
    """
    num_tokens = _int32([entry.num_tokens for entry in scheduled])
    contexts = _int32([entry.start for entry in scheduled])
    starts = _starts(num_tokens)
    sampled = [index for index, entry in enumerate(scheduled) if entry.samples]
    logits_rows = np.arange(starts[-1]) if all_rows else _logits_rows(scheduled, sampled, starts)
    memories = [entry.sequence.held_memory for entry in scheduled]
    return pack_step(memories, contexts, num_tokens, _token_ids(scheduled), logits_rows), sampled


def pack_step(
    memories: SequenceOf[Memory],
    contexts: np.ndarray,
    num_tokens: np.ndarray,
    token_ids: np.ndarray,
    logits_rows: np.ndarray,
) -> dict[str, Tensor]:
    """The inputs of a program (all int32) for a step of ``num_tokens[i]`` tokens of each sequence.

    ``contexts``: the tokens of each that its states have. ``token_ids``: of all sequences, one after another.
    """
    starts = _starts(num_tokens)
    positions = np.empty((3, starts[-1]), dtype=np.int32)  # text: all three MRoPE axes agree
    positions[:] = np.arange(starts[-1], dtype=np.int32) + (contexts - starts[:-1]).repeat(num_tokens)
    arrays = {
        "input_ids": token_ids,
        "positions": positions,
        "query_start_loc": starts,
        "seq_lens": contexts + num_tokens,
        "slot_ids": _int32([memory.slot for memory in memories]),
        "num_seqs": _int32([len(memories)]),
        "logits_indices": logits_rows,
        "block_table": _block_table(memories),
    }
    return {name: torch.from_numpy(array.astype(np.int32, copy=False)) for name, array in arrays.items()}


def _int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _starts(num_tokens: np.ndarray) -> np.ndarray:
    """Where the rows of each sequence begin, and where those of the last one end."""
    starts = np.zeros(len(num_tokens) + 1, dtype=np.int32)
    num_tokens.cumsum(out=starts[1:])
    return starts


def _token_ids(scheduled: SequenceOf[ScheduledSequence]) -> np.ndarray:
    token_ids: list[int] = []
    for entry in scheduled:
        known = entry.num_tokens - entry.num_drafts
        token_ids += entry.sequence.token_ids[entry.start : entry.start + known]
        token_ids += entry.sequence.draft_token_ids[: entry.num_drafts]
    return _int32(token_ids)


def _logits_rows(scheduled: SequenceOf[ScheduledSequence], sampled: SequenceOf[int], starts: np.ndarray) -> np.ndarray:
    rows, ends = list[int](), starts.tolist()
    for index in sampled:
        end = ends[index + 1]
        rows += range(end - scheduled[index].num_logits_rows, end)
    return _int32(rows or [0])


def _block_table(memories: SequenceOf[Memory]) -> np.ndarray:
    """A row of pages for each, padded with -1."""
    width = max(len(memory.blocks) for memory in memories)
    return np.concatenate([memory.block_row(width) for memory in memories]).reshape(-1, width)
