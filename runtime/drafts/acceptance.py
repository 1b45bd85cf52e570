"""How many drafts are accepted: of a request, which may end its drafts, and of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from qwen4exp_trt.runtime.metrics import PREFIX, Metric, Sample

GIVE_UP_AFTER = 24
"""Steps in a row with drafts of which none was accepted, after which a request gets no more."""


@dataclass
class RequestAcceptance:
    """Of one request."""

    num_in_vain: int = 0
    """Steps with drafts since the last in which one was accepted."""

    @property
    def is_off(self) -> bool:
        """Whether the request gets no more drafts: they cost time, and it has none to win."""
        return self.num_in_vain >= GIVE_UP_AFTER

    def count(self, num_accepted: int) -> None:
        """A step with drafts is over."""
        self.num_in_vain = 0 if num_accepted else self.num_in_vain + 1


class DraftCounters:
    """Of all requests; the lists are by the position of a draft in its step."""

    def __init__(self, max_drafts: int) -> None:
        self.proposed_per_position = [0] * max_drafts
        self.accepted_per_position = [0] * max_drafts
        """A draft is accepted only if all before it in its step are."""
        self.num_switched_off = 0
        """Requests whose drafts ended early."""

    @property
    def acceptance_rates(self) -> list[float]:
        """The share of accepted drafts at each position; NaN where none was verified."""
        pairs = zip(self.accepted_per_position, self.proposed_per_position, strict=True)
        return [accepted / proposed if proposed else float("nan") for accepted, proposed in pairs]

    def count(self, num_proposed: int, num_accepted: int) -> None:
        """Take the outcome of one sequence's step."""
        for position in range(num_proposed):
            self.proposed_per_position[position] += 1
            self.accepted_per_position[position] += position < num_accepted

    def collect(self) -> Iterator[Metric]:
        """In Prometheus' terms."""
        proposed, accepted = self.proposed_per_position, self.accepted_per_position
        yield _per_position("num_draft_tokens_per_pos", "counter", "Draft tokens that were verified.", proposed)
        yield _per_position("num_accepted_tokens_per_pos", "counter", "Draft tokens that were accepted.", accepted)
        text = "Share of the verified draft tokens that were accepted."
        yield _per_position("acceptance_rate_per_pos", "gauge", text, self.acceptance_rates)
        samples = [Sample({}, self.num_switched_off)]
        yield Metric(f"{PREFIX}spec_decode_num_switched_off", "counter", "Requests whose drafts ended early.", samples)


def _per_position(name: str, kind: Literal["counter", "gauge"], text: str, values: Sequence[float]) -> Metric:
    samples = [Sample({"position": str(position)}, value) for position, value in enumerate(values)]
    return Metric(f"{PREFIX}spec_decode_{name}", kind, f"{text} By position in its step.", samples)
