"""What a bundle is built for: how many sequences, how long, how many tokens a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS

DECODE, PREFILL = "decode", "prefill"
"""The optimization profiles, in engine order."""

DRAFT_ROWS = 8
"""Rows that a decoding sequence may have in one step of the decode profile: its own and those that verify a draft."""


class Extent(NamedTuple):
    """The smallest, the typical and the largest size of a dim."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class EngineLimits:
    """Upper bounds of every step; the engine's optimization profiles and the runtime's buffers derive from them."""

    max_batch_size: int
    """Sequences in one step."""
    max_seq_len: int
    """Tokens of one sequence, prompt and output together."""
    prefill_chunk: int
    """New tokens of one step of the prefill profile."""
    block_size: int
    """Tokens of a page of the paged caches."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BuildError(f"{name} is {value!r}; it must be an integer of at least 1")

    @property
    def blocks_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_seq_len // self.block_size)

    @property
    def max_num_blocks(self) -> int:
        """Pages of a full batch of the longest sequences."""
        return self.max_batch_size * self.blocks_per_seq

    @property
    def num_slots(self) -> int:
        """Rows of the per-sequence states."""
        return self.max_batch_size

    @property
    def max_decode_tokens(self) -> int:
        """New tokens of one step of the decode profile."""
        return DRAFT_ROWS * self.max_batch_size

    @property
    def max_step_tokens(self) -> int:
        """New tokens of any step."""
        return max(self.prefill_chunk, self.max_decode_tokens)

    @property
    def max_logits_rows(self) -> int:
        """Rows of logits that one step can return."""
        return self.max_decode_tokens

    def profile_dims(self) -> dict[str, dict[str, Extent]]:
        """The range of every dynamic dim of the program's inputs and states, by optimization profile."""
        batch, rows = self.max_batch_size, self.max_logits_rows
        shared = {
            "B": Extent(1, batch, batch),
            "B_plus_1": Extent(2, batch + 1, batch + 1),
            "max_blocks": Extent(1, self.blocks_per_seq, self.blocks_per_seq),
            NUM_BLOCKS: Extent(1, self.max_num_blocks, self.max_num_blocks),
            NUM_SLOTS: Extent(1, self.num_slots, self.num_slots),
            "L": Extent(1, batch, rows),
        }
        decode = Extent(1, batch, self.max_decode_tokens)
        prefill = Extent(1, self.prefill_chunk, self.max_step_tokens)
        return {DECODE: {"T": decode, **shared}, PREFILL: {"T": prefill, **shared}}
