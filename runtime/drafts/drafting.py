"""What the serving loop knows of drafts: who proposes them, for whom, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from qwen4exp_trt.runtime.drafts.acceptance import DraftCounters
from qwen4exp_trt.runtime.drafts.config import SpeculativeConfig
from qwen4exp_trt.runtime.drafts.mtp_proposer import MtpProposer
from qwen4exp_trt.runtime.drafts.ngram_proposer import NgramProposer
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.metrics import Metric
from qwen4exp_trt.runtime.state_pool import StatePool
from qwen4exp_trt.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:  # they import this package
    from qwen4exp_trt.runtime.program_backend import ProgramBackend
    from qwen4exp_trt.runtime.scheduler import ScheduledSequence
    from qwen4exp_trt.runtime.sequence import Sequence


class Proposer(Protocol):
    """Where drafts come from. A step calls `observe`, then `propose`."""

    @property
    def states(self) -> StatePool | None:
        """What it keeps of sequences beside the states of the backend, slot by slot."""
        ...

    num_lookahead: int
    """Positions behind those of a step that `propose` may write to."""
    num_rewritten: int
    """Positions in front of a restored sequence's next one that `observe` may write to."""

    def observe(self, entries: SequenceOf[ScheduledSequence], stack: Tensor | None) -> None:
        """A step has run and is committed.

        ``entries``: all that it ran. Sequences that were dropped have no memory any more, those that have ended still
        have. ``stack``: the model's rows ``[T, W]`` of their tokens, where a program has this output.
        """
        ...

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> None:
        """Set the drafts of sequences that have one token to run, at most as many as is said with each."""
        ...


def make_drafting(
    config: SpeculativeConfig | None,
    head: ProgramBackend | None,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
) -> Drafting | None:
    """The drafts that ``config`` asks for, if any. ``head``: the bundle's draft head, loaded, which ``mtp`` needs."""
    if config is None:
        return None
    if config.method == "ngram":
        return Drafting(config, NgramProposer())
    assert head is not None, "the backend is loaded with its draft head"
    vocab_limit = None if tokenizer is None else tokenizer.vocab_size
    count, block_size = config.num_speculative_tokens, manifest.limits.block_size
    return Drafting(config, MtpProposer(head, count, block_size, manifest.vocab_size, vocab_limit))


class Drafting:
    """Gives sequences drafts of ``proposer``, and counts what became of them.

    A sequence gets no more once its `RequestAcceptance` is off. The proposer goes on observing it, so that its states,
    and what a prefix cache keeps of them, stay complete.
    """

    def __init__(self, config: SpeculativeConfig, proposer: Proposer) -> None:
        self.config, self.proposer = config, proposer
        self.counters = DraftCounters(config.num_speculative_tokens)

    def verified(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """A step verified drafts of ``sequence``."""
        self.counters.count(num_proposed, num_accepted)
        was_off = sequence.acceptance.is_off
        sequence.acceptance.count(num_accepted)
        self.counters.num_switched_off += sequence.acceptance.is_off and not was_off

    def propose(self, sequences: Iterable[Sequence]) -> None:
        """Set the drafts of those of ``sequences`` that can use some; the others have none."""
        wanted: list[tuple[Sequence, int]] = []
        for sequence in sequences:
            sequence.set_drafts([])
            count = min(self.config.num_speculative_tokens, sequence.num_drafts_wanted)
            if count > 0 and sequence.num_tokens_left == 1 and not sequence.acceptance.is_off:
                wanted.append((sequence, count))
        if wanted:
            self.proposer.propose(wanted)

    def collect(self) -> Iterable[Metric]:
        """For `EngineMetrics.add_source`."""
        return self.counters.collect()
