"""How many drafts are accepted: of a request, which may end its drafts, and of all."""

from __future__ import annotations

from dataclasses import dataclass, field

GIVE_UP_AFTER = 24
"""Steps in a row with drafts of which none was accepted, after which a request gets no more."""


@dataclass
class RequestAcceptance:
    """Of one request. It is off for good when no draft was accepted in `GIVE_UP_AFTER` steps one after another."""

    num_proposed: int = 0
    num_accepted: int = 0
    num_in_vain: int = 0
    """Steps since the last that accepted a draft."""

    @property
    def is_off(self) -> bool:
        return self.num_in_vain >= GIVE_UP_AFTER

    def count(self, num_proposed: int, num_accepted: int) -> None:
        """Take the outcome of a step with drafts."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self.num_in_vain = 0 if num_accepted else self.num_in_vain + 1


@dataclass
class DraftCounters:
    """Of all requests; the lists are by the position of a draft in its step."""

    max_drafts: int
    num_drafts: int = 0
    """Steps of a sequence with drafts."""
    num_switched_off: int = 0
    """Requests whose drafts ended early."""
    proposed_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.proposed_per_position = [0] * self.max_drafts
        self.accepted_per_position = [0] * self.max_drafts

    @property
    def num_proposed(self) -> int:
        return sum(self.proposed_per_position)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_rates(self) -> list[float]:
        """The share of accepted drafts at each position, of those that were proposed and verified there; NaN of none.

        A draft counts as accepted only if all before it in its step are.
        """
        pairs = zip(self.accepted_per_position, self.proposed_per_position, strict=True)
        return [accepted / proposed if proposed else float("nan") for accepted, proposed in pairs]

    def count(self, num_proposed: int, num_accepted: int) -> None:
        """Take the outcome of one sequence's step."""
        self.num_drafts += 1
        for position in range(num_proposed):
            self.proposed_per_position[position] += 1
            self.accepted_per_position[position] += position < num_accepted
