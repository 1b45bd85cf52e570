"""Steps of a draft head, made by hand: pairs of a token and the stack of the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from draft_head_reference import DraftHeadReference
from hf_parity import StableTopk
from torch import Tensor

from qwen4exp_trt.runtime.step_result import StepResult


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` up to ``start + len(ids)`` of the sequence that has ``slot``, and pages of its own."""

    slot: int
    start: int
    ids: Sequence[int]
    stack: Tensor | None = None
    """``[len(ids), HC*H]``; None in a step of the model."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


def step_inputs(
    *rows: Rows, pages: int = 64, positions: Tensor | None = None, num_logits: int | None = None
) -> dict[str, Tensor]:
    """A step of these rows, of which all, or the last ``num_logits``, give logits.

    ``pages`` of each sequence; ``positions`` ``[3, T]`` for MRoPE.
    """
    in_text = torch.tensor([position for part in rows for position in range(part.start, part.end)]).repeat(3, 1)
    starts = [0, *accumulate(len(part.ids) for part in rows)]
    values: dict[str, Any] = {
        "input_ids": [token for part in rows for token in part.ids],
        "positions": in_text if positions is None else positions,
        "query_start_loc": starts,
        "seq_lens": [part.end for part in rows],
        "slot_ids": [part.slot for part in rows],
        "block_table": [list(range(part.slot * pages, (part.slot + 1) * pages)) for part in rows],
        "num_seqs": [len(rows)],
        "logits_indices": list(range(starts[-1]))[-(num_logits or starts[-1]) :],
    }
    inputs = {name: torch.as_tensor(value, dtype=torch.int32) for name, value in values.items()}
    stacks = [part.stack for part in rows if part.stack is not None]
    return {**inputs, "stack": torch.cat(stacks)} if stacks else inputs


def run_pairs(backend: Any, *rows: Rows, **options: Any) -> tuple[Tensor, Tensor]:
    """Logits and the draft head's own stacks of a step of pairs."""
    result: StepResult = backend.run_step(step_inputs(*rows, **options))
    assert result.stack is not None
    return result.logits, result.stack


@torch.no_grad()
def reference_stacks(
    reference: Any, token_ids: Sequence[int], positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits ``[T, V]`` of transformers' model, and the stacks ``[T, HC*H]`` behind its last layer."""
    found: list[Tensor] = []
    hook = reference.model.layers[-1].register_forward_hook(lambda module, args, result: found.append(result))
    position_ids = None if positions is None else positions[:, None]
    with StableTopk():
        logits = reference(torch.tensor([list(token_ids)]), position_ids=position_ids, use_cache=False).logits[0]
    hook.remove()
    return logits, found[0][0]


@torch.no_grad()
def reference_drafts(
    reference: Any, head: DraftHeadReference, next_ids: Sequence[int], stack: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits and own stacks of pairs 0 to T - 1 in one pass; ``next_ids`` are tokens 1 to T, ``stack`` 0 to T - 1."""
    with StableTopk():
        read, own = head(reference.model.embed_tokens(torch.tensor(list(next_ids))), stack, positions)
    return reference.lm_head(read), own
