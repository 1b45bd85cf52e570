"""Drafts from a sequence's own text: what followed its last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from qwen4exp_trt.runtime.drafts.prompt_lookup import PromptLookup

if TYPE_CHECKING:  # they import this package
    from qwen4exp_trt.runtime.scheduler import ScheduledSequence
    from qwen4exp_trt.runtime.sequence import Sequence


class NgramProposer:
    """Prompt lookup. It has no states on the device, and its drafts are not sampled."""

    states = None
    num_lookahead = num_rewritten = 0

    def __init__(self) -> None:
        self._lookups: WeakKeyDictionary[Sequence, PromptLookup] = WeakKeyDictionary()

    def observe(self, entries: SequenceOf[ScheduledSequence], stack: Tensor | None) -> None:
        """Take the tokens of the step, so that a long prompt is taken in as it is computed."""
        for entry in entries:
            self._lookup(entry.sequence)

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> None:
        for sequence, count in wanted:
            sequence.set_drafts(self._lookup(sequence).continuation(count))

    def _lookup(self, sequence: Sequence) -> PromptLookup:
        """Of the tokens up to the one that runs next."""
        lookup = self._lookups.setdefault(sequence, PromptLookup())
        lookup.extend(sequence.token_ids[len(lookup) : sequence.num_computed + 1])
        return lookup
