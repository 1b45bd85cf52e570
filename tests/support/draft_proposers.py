"""Proposers that tests steer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from qwen4exp_trt.runtime.drafts.config import SpeculativeConfig
from qwen4exp_trt.runtime.drafts.drafting import Drafting
from qwen4exp_trt.runtime.drafts.mtp_proposer import MtpProposer
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence

Propose = Callable[[RequestSequence, int], Sequence[int]]


class GivenDrafts:
    """Proposes what ``propose(sequence, count)`` says, of which it takes the first ``count``."""

    states = None
    num_lookahead = num_rewritten = 0

    def __init__(self, propose: Propose) -> None:
        self._propose = propose

    def observe(self, entries: Sequence[ScheduledSequence], stack: Tensor | None) -> None:
        """Whatever was not dropped still has its memory."""
        assert all((entry.sequence.memory is None) == (entry.sequence.error is not None) for entry in entries)

    def propose(self, wanted: Sequence[tuple[RequestSequence, int]]) -> None:
        for sequence, count in wanted:
            sequence.set_drafts(self._propose(sequence, count)[:count])


class GivenDraftsBesideHead(GivenDrafts):
    """The same, with a draft head that works as always, but whose drafts nobody gets."""

    def __init__(self, propose: Propose, head: MtpProposer) -> None:
        super().__init__(propose)
        self._head = head
        self.states, self.num_rewritten, self.num_lookahead = head.states, head.num_rewritten, head.num_lookahead

    def observe(self, entries: Sequence[ScheduledSequence], stack: Tensor | None) -> None:
        self._head.observe(entries, stack)

    def propose(self, wanted: Sequence[tuple[RequestSequence, int]]) -> None:
        self._head.propose(wanted)
        super().propose(wanted)


def drafting_of(propose: Propose, max_drafts: int = 7) -> Drafting:
    return Drafting(SpeculativeConfig("ngram", max_drafts), GivenDrafts(propose))


def right_up_to(texts: dict[tuple[int, ...], Sequence[int]], num_right: Callable[[], int], vocab_size: int) -> Propose:
    """Drafts from the known outputs of prompts: ``num_right()`` right ones, and wrong ones behind them."""

    def propose(sequence: RequestSequence, count: int) -> list[int]:
        text = [*sequence.prompt_token_ids, *texts[tuple(sequence.prompt_token_ids)]]
        done = len(sequence.token_ids)
        assert sequence.token_ids == text[:done], "the text goes on as without drafts"
        drafts, right = text[done : done + count], num_right()
        drafts += [0] * (count - len(drafts))
        return [*drafts[:right], *((draft + 1) % vocab_size for draft in drafts[right:])]

    return propose
