"""What an op has to move and multiply in a step, whatever kernel does it: the floor that a roofline is made of.

Each byte counts once, however often a kernel reads it. FLOPs are the products and sums of matrices; elementwise work
(norms, gates, short convolutions) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qwen4exp_trt.errors import PluginError


@dataclass(frozen=True)
class StepSize:
    """One step: ``num_tokens`` new tokens in all, each sequence as many, behind ``context_len`` tokens each.

    PluginError if the tokens cannot be shared out so.
    """

    num_seqs: int
    num_tokens: int
    context_len: int
    num_logits: int | None = None
    """Rows of logits; None for one a sequence."""
    distinct_experts: float | None = None
    """How many routed experts a layer uses, where that was measured; None for `expected_experts`."""

    def __post_init__(self) -> None:
        if self.num_seqs < 1 or self.num_tokens < 1 or self.num_tokens % self.num_seqs or self.context_len < 0:
            raise PluginError(
                f"a step of {self.num_tokens} tokens of {self.num_seqs} sequences behind {self.context_len} each; "
                "expected at least one sequence, as many tokens of each, and no negative context"
            )

    @property
    def new_tokens(self) -> int:
        """Of each sequence."""
        return self.num_tokens // self.num_seqs

    @property
    def seq_len(self) -> int:
        """Tokens of each sequence after the step."""
        return self.context_len + self.new_tokens

    @property
    def logits_rows(self) -> int:
        return self.num_seqs if self.num_logits is None else self.num_logits


@dataclass(frozen=True)
class Cost:
    """Bytes that are read or written, and FLOPs."""

    weight_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    """Of operands and results that are neither weights nor states. A GPU may keep them in its caches."""
    flops: int = 0

    @property
    def memory_bytes(self) -> int:
        """What has to come from memory, or go there: weights and states."""
        return self.weight_bytes + self.state_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.state_bytes + other.state_bytes,
            self.activation_bytes + other.activation_bytes,
            self.flops + other.flops,
        )


def sum_costs(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


@dataclass(frozen=True)
class CostCall:
    """A call in a step: what a spec states its cost from."""

    size: StepSize
    dims: Mapping[str, int]
    """The named dims of the spec, and its int attributes."""
    attrs: Mapping[str, Any]
    num_bytes: Mapping[str, int]
    """Of each whole operand and result by name."""


@dataclass(frozen=True)
class Work:
    """What a call does: its FLOPs, and the bytes of operands and results that it does not move whole, once.

    A mutated operand that is not named is read and written: twice its size.
    """

    flops: int = 0
    moved: Mapping[str, int] = field(default_factory=dict)


CostFunction = Callable[[CostCall], Work]


def moves_operands(call: CostCall) -> Work:
    """Of an op that moves all operands and results once and multiplies no matrices."""
    return Work()


def expected_experts(num_experts: int, num_experts_per_tok: int, num_tokens: int) -> float:
    """The expected number of distinct experts of ``num_tokens`` tokens that choose alike at random.

    An expert is not among the k of E that a token chooses with probability 1 - k / E; so E (1 - (1 - k / E)^T) are
    chosen at least once. Tokens of one text choose more alike than that.
    """
    return num_experts * (1 - (1 - num_experts_per_tok / num_experts) ** num_tokens)


def ring_bytes(size: StepSize, row_bytes: int, num_rows: int, rows_read: int) -> int:
    """Of a ring of ``num_rows`` rows a sequence: of those before the step ``rows_read`` are read, if there are as many,
    and the newest new ones are written."""
    return size.num_seqs * row_bytes * (min(rows_read, size.context_len) + min(size.new_tokens, num_rows))


def visible_groups(size: StepSize, ratio: int) -> int:
    """Complete groups of ``ratio`` tokens of a sequence after the step."""
    return size.seq_len // ratio


def scored_groups(size: StepSize, ratio: int, most: int) -> int:
    """Groups of a sequence whose keys are read for a score: all, or none where ``most`` or fewer are all selected."""
    groups = visible_groups(size, ratio)
    return groups if groups > most else 0


def completed_groups(size: StepSize, ratio: int) -> int:
    """Groups that the step completes, of all sequences."""
    return size.num_seqs * (size.seq_len // ratio - size.context_len // ratio)


def sum_of_groups(num_tokens: int, ratio: int) -> int:
    """Complete groups before and at each of the first ``num_tokens`` tokens, added up."""
    groups, rest = divmod(num_tokens + 1, ratio)
    return ratio * groups * (groups - 1) // 2 + groups * rest


def selected_tokens(num_groups: int, ratio: int) -> int | None:
    """The most tokens that a query attends to: ``num_groups`` groups and an open one. None for all: ``ratio`` is 0."""
    return num_groups * ratio + ratio - 1 if ratio else None


def attended_tokens(size: StepSize, most: int | None) -> int:
    """Tokens that each new one of a sequence attends to, at most ``most`` and itself among them, added up."""
    first, last = size.context_len + 1, size.seq_len
    if most is None or last <= most:
        return (first + last) * size.new_tokens // 2
    ramp = max(0, most - size.context_len)
    return (first + most) * ramp // 2 + most * (size.new_tokens - ramp)


def moved_kv_tokens(size: StepSize, most: int | None) -> int:
    """Tokens of a KV cache that a step reads or writes. Rows of a sequence read what each selects, but no token of it
    more than once; rows that select alike read less."""
    return size.num_seqs * (min(size.seq_len, attended_tokens(size, most)) + size.new_tokens)
