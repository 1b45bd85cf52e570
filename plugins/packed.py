"""The packed batch as ops see it, and conversions between packed rows ``[T, ...]`` and padded ``[B, L, ...]``.

A batch packs the new tokens of B sequences one after another: sequence b owns rows ``query_start_loc[b]`` up to
``query_start_loc[b + 1]``, and ``seq_lens[b]`` counts its tokens after this step. Sequences from ``num_seqs`` on are
padding: their rows are neither read nor written, and no state of theirs changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen4exp_trt.plugins.spec import TensorArg

QUERY_START_LOC = TensorArg("query_start_loc", ("B + 1",), "int32")
SEQ_LENS = TensorArg("seq_lens", ("B",), "int32")
SLOT_IDS = TensorArg("slot_ids", ("B",), "int32")
BLOCK_TABLE = TensorArg("block_table", ("B", "MB"), "int32")
NUM_SEQS = TensorArg("num_seqs", (1,), "int32")


@dataclass(frozen=True)
class PackedBatch:
    """Index tensors of one packed batch, for the ``num_seqs`` real sequences and their N new tokens."""

    num_rows: int
    query_lens: Tensor  # [B] new tokens
    context_lens: Tensor  # [B] tokens before this step
    seq_of_token: Tensor  # [N]
    offset_of_token: Tensor  # [N] index of the token within its sequence's new tokens

    @classmethod
    def from_metadata(cls, num_rows: int, query_start_loc: Tensor, seq_lens: Tensor, num_seqs: Tensor) -> PackedBatch:
        count = int(num_seqs)
        starts = query_start_loc[: count + 1].long()
        query_lens = starts.diff()
        seq_of_token = torch.repeat_interleave(torch.arange(count), query_lens)
        offset_of_token = torch.arange(len(seq_of_token)) - starts[seq_of_token]
        return cls(num_rows, query_lens, seq_lens[:count].long() - query_lens, seq_of_token, offset_of_token)

    @property
    def num_tokens(self) -> int:
        return len(self.seq_of_token)

    @property
    def max_query_len(self) -> int:
        """1 of a batch that is padding alone, so that what looks back has a window there, too."""
        return int(self.query_lens.max()) if len(self.query_lens) else 1

    @property
    def position_of_token(self) -> Tensor:
        """[N] index of each token in its sequence."""
        return self.context_lens[self.seq_of_token] + self.offset_of_token

    def pad(self, rows: Tensor) -> Tensor:
        """``[T, ...]`` -> ``[B, L, ...]`` with zeros behind each sequence's last token."""
        padded = rows.new_zeros(len(self.query_lens), self.max_query_len, *rows.shape[1:])
        padded[self.seq_of_token, self.offset_of_token] = rows[: self.num_tokens]
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        """``[B, L, ...]`` -> ``[T, ...]``; rows that belong to no sequence are zero."""
        rows = padded.new_zeros(self.num_rows, *padded.shape[2:])
        rows[: self.num_tokens] = padded[self.seq_of_token, self.offset_of_token]
        return rows

    def load_state(self, state: Tensor, slot_ids: Tensor) -> Tensor:
        """The row of ``state`` ``[S, ...]`` of each sequence, zeros for a sequence that has no context yet."""
        rows = state[slot_ids[: len(self.query_lens)].long()]
        fresh = (self.context_lens == 0).reshape(-1, *[1] * (rows.dim() - 1))
        return torch.where(fresh, torch.zeros_like(rows), rows)

    def load_ring(self, ring: Tensor, slot_ids: Tensor, count: int, init: int = 0) -> Tensor:
        """The ``count`` rows before each sequence's new tokens, ``[B, count, ...]``, oldest first.

        ``ring`` ``[S, R, ...]`` is addressed by position: the token at position p has row p % R. Rows from before a
        sequence's first token are ``init``, whatever the ring holds.
        """
        slots = slot_ids[: len(self.query_lens), None].long()
        positions = self.context_lens[:, None] + torch.arange(-count, 0)
        rows = ring[slots, positions.remainder(ring.shape[1])]
        exists = (positions >= 0).reshape(*positions.shape, *[1] * (rows.dim() - 2))
        return torch.where(exists, rows, torch.full_like(rows, init))

    def store_ring(self, ring: Tensor, slot_ids: Tensor, rows: Tensor) -> None:
        """Write the newest of the new rows ``[T, ...]`` of each sequence into ``ring``, at most one ring's worth.

        A ring of C + D rows still holds the C rows before any of the last D new tokens. So those tokens can be taken
        back: the next step just has a shorter context.
        """
        length = self.query_lens[self.seq_of_token]
        newest = self.offset_of_token >= length - ring.shape[1]
        slots = slot_ids[self.seq_of_token[newest]].long()
        target = self.position_of_token[newest].remainder(ring.shape[1])
        ring[slots, target] = rows[: self.num_tokens][newest].to(ring.dtype)
