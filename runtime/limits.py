"""What a bundle is built for: how many sequences, how long, how many tokens a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from qwen4exp_trt.errors import BuildError

DRAFT_ROWS = 8
"""Rows that a decoding sequence may have in one step of the decode profile: its own and those that verify a draft."""

_LARGEST = {"max_batch_size": 2**12, "max_seq_len": 2**24, "prefill_chunk": 2**16, "block_size": 2**16}
"""TensorRT multiplies shapes in int32 and has crashed, not refused, when given products beyond that."""


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
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST[name]:
                raise BuildError(f"{name} is {value!r}; it must be an integer from 1 to {_LARGEST[name]}")

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

    @property
    def largest_step(self) -> dict[str, int]:
        """The most rows that an output can have, by the name of its first dim."""
        return {"T": self.max_step_tokens, "L": self.max_logits_rows}
