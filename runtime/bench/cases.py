"""What is measured, within what a bundle and its memory allow; what does not fit is named with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from qwen4exp_trt.runtime.drafts.config import MAX_DRAFTS
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits


class StepKind(StrEnum):
    """What a step of a decoding sequence does."""

    PLAIN = "plain"
    """A token."""
    VERIFY = "verify"
    """A token and the verification of drafts, which are of nobody."""
    DRAFT = "draft"
    """The same, and the draft head proposes them."""


@dataclass(frozen=True)
class DecodeCase:
    """Steps of ``batch`` sequences that have ``context`` tokens when the first begins, with ``drafts`` each."""

    batch: int
    context: int
    kind: StepKind = StepKind.PLAIN
    drafts: int = 0

    @property
    def rows(self) -> int:
        """Of a sequence in a step."""
        return self.drafts + 1

    def __str__(self) -> str:
        drafts = "" if self.kind is StepKind.PLAIN else f", {self.drafts} {self.kind}"
        return f"decode of {self.batch} x {self.context:,} tokens{drafts}"


@dataclass(frozen=True)
class PrefillCase:
    """The first token of one prompt of ``prompt`` tokens."""

    prompt: int

    def __str__(self) -> str:
        return f"prefill of {self.prompt:,} tokens"


@dataclass(frozen=True)
class GenerateCase:
    """`LLM.generate` with sampling: ``batch`` random prompts of ``prompt`` tokens, ``output`` tokens each."""

    batch: int
    prompt: int
    output: int
    with_drafts: bool = False

    def __str__(self) -> str:
        drafts = " with drafts" if self.with_drafts else ""
        return f"generate {self.batch} x {self.output} tokens behind {self.prompt}{drafts}"


Case = DecodeCase | PrefillCase | GenerateCase


@dataclass(frozen=True)
class LeftOut:
    """A case that is not measured, and why."""

    case: Case
    reason: str


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    iterations: int
    """Timed steps of a case, at most."""
    warm_up: int
    """Steps before them."""
    seconds: float
    """After which a case takes no more than `least` measurements."""
    runs: int
    """Prompts, and calls of ``generate``."""
    all_batches: bool
    """Every power of two, not the smallest and the largest alone."""
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    drafts: tuple[int, ...]
    """Of a sequence in a step with drafts."""
    to_the_longest: bool
    """Whether a prompt of the bundle's longest sequence is computed."""
    least: int = 3
    """Measurements of a case however long they take; one of a prompt that alone takes longer than `seconds`."""


_GENERATE_PROMPT = 128
_CONTEXTS, _PROMPTS = (2048, 32_768, 131_072), (512, 2048, 8192)

EFFORTS = {
    "quick": Effort(
        iterations=20,
        warm_up=5,
        seconds=2.0,
        runs=2,
        all_batches=False,
        contexts=_CONTEXTS[:1],
        prompts=_PROMPTS[:2],
        drafts=(3,),
        to_the_longest=False,
    ),
    "default": Effort(
        iterations=60,
        warm_up=10,
        seconds=6.0,
        runs=4,
        all_batches=True,
        contexts=_CONTEXTS,
        prompts=_PROMPTS,
        drafts=(1, 3, 7),
        to_the_longest=False,
    ),
    "full": Effort(
        iterations=200,
        warm_up=20,
        seconds=30.0,
        runs=8,
        all_batches=True,
        contexts=(2048, 8192, 32_768, 65_536, 131_072),
        prompts=(*_PROMPTS, 32_768, 131_072),
        drafts=(1, 2, 3, 7),
        to_the_longest=True,
    ),
}
"""By name. All decode at the bundle's longest context as well."""


@dataclass(frozen=True)
class Selection:
    """What the user asked for; None for what the effort has."""

    decode: bool = True
    prefill: bool = True
    generate: bool = True
    batches: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    prompts: tuple[int, ...] | None = None
    drafts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Room:
    """What a loaded bundle can hold."""

    limits: EngineLimits
    num_blocks: int
    max_num_seqs: int
    has_draft_head: bool


@dataclass(frozen=True)
class Cases:
    """In the order in which they are measured."""

    cases: tuple[Case, ...]
    left_out: tuple[LeftOut, ...]


def choose_cases(selection: Selection, effort: Effort, room: Room) -> Cases:
    """The cases of ``effort``, with what ``selection`` has in its place."""
    wanted: list[Case] = []
    if selection.decode:
        wanted += _decode_cases(selection, effort, room)
    if selection.prefill:
        wanted += map(PrefillCase, _prompts(selection, effort, room))
    if selection.generate:
        wanted += _generate_cases(selection, effort, room)
    distinct = list(dict.fromkeys(wanted))
    reasons = {case: _why_not(case, effort, room) for case in distinct}
    fitting = tuple(case for case in distinct if reasons[case] is None)
    return Cases(fitting, tuple(LeftOut(case, reason) for case, reason in reasons.items() if reason is not None))


def batch_sizes(selection: Selection, effort: Effort, room: Room) -> tuple[int, ...]:
    """Powers of two, and the most sequences that run at a time."""
    if selection.batches is not None:
        return selection.batches
    most = room.max_num_seqs
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*(powers if effort.all_batches else powers[:1]), most)


def longest_context(effort: Effort, room: Room, rows: int = 1) -> int:
    """At which the steps of a case still fit in the longest sequence, and a page is left to it when they begin."""
    limits = room.limits
    return max(
        1, min(limits.max_seq_len - new_tokens(effort, rows), (limits.blocks_per_seq - 1) * limits.block_size - 1)
    )


def new_tokens(effort: Effort, rows: int) -> int:
    """Tokens that the steps of a case may add to a sequence: the one that they begin with, one step to find what has to
    be compiled, and as many again as all drafts are right."""
    return 1 + rows * (effort.warm_up + effort.iterations + 2)


def _decode_cases(selection: Selection, effort: Effort, room: Room) -> Iterator[DecodeCase]:
    batches = batch_sizes(selection, effort, room)
    for batch in batches:
        for context in _contexts(selection, effort, room, 1):
            yield DecodeCase(batch, context)
    for drafts in effort.drafts if selection.drafts is None else selection.drafts:
        if drafts == 0:
            continue
        for batch in dict.fromkeys((batches[0], batches[-1])):
            context = min(_contexts(selection, effort, room, drafts + 1))
            yield DecodeCase(batch, context, StepKind.VERIFY, drafts)
            if room.has_draft_head:
                yield DecodeCase(batch, context, StepKind.DRAFT, drafts)


def _contexts(selection: Selection, effort: Effort, room: Room, rows: int) -> Sequence[int]:
    if selection.contexts is not None:
        return selection.contexts
    return (*effort.contexts, longest_context(effort, room, rows))


def _prompts(selection: Selection, effort: Effort, room: Room) -> Sequence[int]:
    if selection.prompts is not None:
        return selection.prompts
    return (*effort.prompts, room.limits.max_seq_len - 1) if effort.to_the_longest else effort.prompts


def _generate_cases(selection: Selection, effort: Effort, room: Room) -> Iterator[GenerateCase]:
    longest, batches = room.limits.max_seq_len, batch_sizes(selection, effort, room)
    prompt = max(1, min(_GENERATE_PROMPT, room.limits.prefill_chunk, longest // 4))
    output = max(2, min(4 * effort.iterations, longest // 2))
    for batch in dict.fromkeys((batches[0], batches[-1])):
        yield GenerateCase(batch, prompt, output)
        if room.has_draft_head:
            yield GenerateCase(batch, prompt, output, with_drafts=True)


def _why_not(case: Case, effort: Effort, room: Room) -> str | None:
    """Why ``case`` cannot be measured; None if it can."""
    if isinstance(case, PrefillCase):
        return _why_too_long(1, case.prompt + 1, room, case.prompt)
    if case.batch > room.max_num_seqs:
        return f"{room.max_num_seqs} sequences run at a time, at most"
    if isinstance(case, GenerateCase):
        return _why_too_long(case.batch, case.prompt + case.output, room, case.prompt)
    if case.drafts > MAX_DRAFTS:
        return f"a step verifies at most {MAX_DRAFTS} drafts of a sequence"
    return _why_too_long(case.batch, case.context + new_tokens(effort, case.rows), room, case.context + 1)


def _why_too_long(batch: int, length: int, room: Room, start: int = 1) -> str | None:
    """Of sequences that have ``start`` tokens at first and ``length`` in the end."""
    limits = room.limits
    if length > limits.max_seq_len:
        return f"takes {length:,} tokens with those of its steps; the bundle is built for {limits.max_seq_len:,}"
    in_the_end = batch * min(-(-(length + DRAFT_ROWS) // limits.block_size), limits.blocks_per_seq)
    # The scheduler starts a sequence only if a page is left for each that runs.
    at_first = batch * -(-start // limits.block_size) + batch - 1
    pages = max(in_the_end, at_first)
    if pages > room.num_blocks:
        return f"takes {pages:,} pages of {limits.block_size} tokens, and there is memory for {room.num_blocks:,}"
    return None
