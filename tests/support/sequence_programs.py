"""Random programs over sequences: whatever was done to their states, each goes on as if computed from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor, fx

from qwen4exp_trt.frontend.states import RINGS
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.packed_inputs import InputLayout, StagedInputs, StepShape
from qwen4exp_trt.runtime.program_backend import ProgramBackend
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_states import SequenceStates, Snapshot
from qwen4exp_trt.runtime.specs import StateKind
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states
from qwen4exp_trt.runtime.step_inputs import build_step_inputs
from qwen4exp_trt.runtime.stopping import StopChecker

TOLERANCE = 1e-5
MAX_LEN = 44
"""Beyond the indexer's budget, so that selections leave groups out."""
CHUNK = 14
NUM_SLOTS = 3
NUM_BLOCKS = 12
"""Fewer than the sequences would like."""
_OBSERVED = ("qsa_select", "ple_hash")
_GARBAGE = {torch.int32: 2**20 + 1}
"""What free memory holds, where it cannot be NaN."""
FIRST_ID = 4
IDS = st.integers(FIRST_ID, 90)
NUMBERS = st.integers(0, 5)
NEXT = st.lists(IDS, max_size=DRAFT_ROWS + 1)


class Model:
    """A program over states of its own, whose steps tell what they select and hash besides their logits.

    ``reference`` is of the same model and computes from scratch; its n-gram table is in memory.
    """

    pads_itself = False
    """Whether a step is padded where it is run, so that no other padding is in it."""

    def __init__(self, backend: EagerBackend, reference: EagerBackend) -> None:
        self.backend, self.from_scratch = backend, reference
        self.limits = EngineLimits(
            max_batch_size=NUM_SLOTS, max_seq_len=MAX_LEN + DRAFT_ROWS, prefill_chunk=CHUNK, block_size=8
        )
        self.reference = cache(self._reference)

    def new_states(self) -> SequenceStates:
        pool = _new_pool(self.backend, NUM_BLOCKS, NUM_SLOTS).joined(self.backend.rows.states)
        return SequenceStates(pool, self.limits, NUM_BLOCKS)

    def run(self, inputs: Mapping[str, Tensor], states: StatePool) -> dict[str, Tensor]:
        """Logits of all rows, and the values of the observed ops by the names of their nodes."""
        return _run(self.backend, self.backend.rows.complete(inputs), states)

    def _reference(self, token_ids: tuple[int, ...]) -> Computed:
        """All of ``token_ids``, the last one as a step of its own, which leaves every state complete."""
        num_blocks = self.limits.blocks_per_seq
        states = SequenceStates(_new_pool(self.from_scratch, num_blocks, NUM_SLOTS), self.limits, num_blocks)
        sequence = new_sequence(list(token_ids))
        assert states.start(sequence) and states.reserve(sequence, len(token_ids))
        parts = []
        for count in filter(None, (len(token_ids) - 1, 1)):
            inputs = build_step_inputs([ScheduledSequence(sequence, count)], all_rows=True)[0]
            parts.append(_run(self.from_scratch, inputs, states.pool))
            states.commit(sequence, count)
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Computed(rows, visible_states(states, sequence))


class EngineModel(Model):
    """A backend as it is, with its own states and all that it does around a step; it tells logits alone.

    It must be built for steps of `NUM_SLOTS` chunks all of whose rows give logits.
    """

    pads_itself = True

    def __init__(self, backend: ProgramBackend, reference: EagerBackend) -> None:
        super().__init__(reference, reference)
        self.engine = backend

    def new_states(self) -> SequenceStates:
        for spec in self.engine.program.states:
            self.engine.states[spec.name].fill_(spec.init)
        return SequenceStates(self.engine.states, self.limits, NUM_BLOCKS)

    def run(self, inputs: Mapping[str, Tensor], states: StatePool) -> dict[str, Tensor]:
        return {"logits": self.engine.run(inputs)}


def _new_pool(backend: EagerBackend, num_blocks: int, num_slots: int) -> StatePool:
    specs = backend.program.states
    return StatePool(specs, allocate_states(specs, num_blocks, num_slots))


def _run(backend: EagerBackend, inputs: Mapping[str, Tensor], states: StatePool) -> dict[str, Tensor]:
    observer = _Observer(backend.program.module)
    logits = backend.program.run(inputs, states, backend.weights, observer.run)["logits"]
    return {"logits": logits} | observer.seen


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        spec = spec_of(n.target)
        if spec is not None and spec.name in _OBSERVED:
            self.seen[n.name] = value
        return value


@dataclass(frozen=True)
class Computed:
    """What a sequence's tokens come to: a row for each token, and the states behind the last."""

    rows: dict[str, Tensor]
    states: dict[str, Tensor]


def new_sequence(token_ids: list[int]) -> Sequence:
    params = SamplingParams()
    checker = StopChecker(params, (), 0, MAX_LEN)
    return Sequence("0", None, token_ids, params, MAX_LEN, checker, None)


def visible_states(states: SequenceStates, sequence: Sequence) -> dict[str, Tensor]:
    """What later tokens may read, behind a step of one token: its rows do not depend on where they are."""
    memory, length = sequence.memory, sequence.num_computed
    assert memory is not None
    visible = {}
    for spec in states.pool.specs:
        state = states.pool[spec.name]
        if spec.kind in RINGS:
            rows = min(state.shape[1] - DRAFT_ROWS, length)
            visible[spec.name] = state[memory.slot, torch.arange(length - rows, length) % state.shape[1]]
        elif spec.kind is StateKind.RECURRENT_STATE:
            visible[spec.name] = state[memory.slot].clone()
        elif spec.kind is StateKind.KV_CACHE:
            visible[spec.name] = state[memory.blocks].transpose(1, 2).flatten(0, 1)[:length]
        elif spec.kind is StateKind.INDEX_K_CACHE:
            ratio = states.block_size // state.shape[1]
            visible[spec.name] = state[memory.blocks].flatten(0, 1)[: length // ratio]
        else:
            assert spec.kind in (StateKind.DRAFT_ROWS, StateKind.COMMITTED_LEN), spec
    return visible


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Integers exactly, floats but for rounding."""
    assert found.shape == expected.shape, what
    if not found.is_floating_point():
        assert torch.equal(found, expected), what
    elif found.numel():
        assert found.isfinite().all(), what
        error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1))
        assert error <= TOLERANCE, (what, error)


@dataclass(eq=False)
class Kept:
    """A snapshot and the tokens that it is of."""

    snapshot: Snapshot
    token_ids: list[int] = field(default_factory=list)


class Programs(RuleBasedStateMachine):
    """See `programs_of`. Sequences and snapshots are chosen by numbers, of which the rests count."""

    model: Model

    @initialize(prompts=st.lists(st.lists(IDS, min_size=1, max_size=CHUNK), min_size=1, max_size=2))
    def begin(self, prompts: list[list[int]]) -> None:
        self.states = self.model.new_states()
        self.alive: list[Sequence] = []
        self.kept: list[Kept] = []
        self.poison()
        for token_ids in prompts:
            self.add(token_ids)

    def chosen(self, number: int) -> Sequence:
        return self.alive[number % len(self.alive)]

    @precondition(lambda self: len(self.alive) <= NUM_SLOTS)
    @rule(token_ids=st.lists(IDS, min_size=1, max_size=CHUNK))
    def add(self, token_ids: list[int]) -> None:
        self.alive.append(new_sequence(token_ids))
        self.step([(len(self.alive) - 1, CHUNK)], [], 0, None)

    @rule(
        chosen=st.lists(st.tuples(NUMBERS, st.integers(1, CHUNK)), min_size=1, max_size=3),
        drafts=st.lists(IDS, max_size=DRAFT_ROWS - 1),
        num_accepted=st.integers(0, DRAFT_ROWS - 1),
        num_padding=st.none() | st.integers(0, 2),
    )
    def step(
        self, chosen: list[tuple[int, int]], drafts: list[int], num_accepted: int, num_padding: int | None
    ) -> None:
        """Chunks of some sequences; those that come to their last token decode, the first of these with drafts."""
        entries: list[ScheduledSequence] = []
        for number, count in chosen if self.alive else ():
            sequence = self.chosen(number)
            if any(entry.sequence is sequence for entry in entries) or not self.is_ready(sequence):
                continue
            num_tokens, num_drafts = min(count, sequence.num_tokens_left), 0
            if sequence.num_tokens_left == 1 and len(sequence.token_ids) + len(drafts) <= MAX_LEN:
                sequence.set_drafts(drafts)
                num_drafts, drafts = len(drafts), []
            if self.reserve(sequence, num_tokens + num_drafts, [*(entry.sequence for entry in entries), sequence]):
                entries.append(ScheduledSequence(sequence, num_tokens + num_drafts, num_drafts))
        if entries:
            self.run(entries, num_accepted, num_padding)

    @rule(number=NUMBERS, token_ids=st.lists(IDS, min_size=1, max_size=CHUNK))
    def extend(self, number: int, token_ids: list[int]) -> None:
        """More of a conversation, after output that was sampled or none."""
        if self.alive:
            sequence = self.chosen(number)
            sequence.token_ids += token_ids[: MAX_LEN - len(sequence.token_ids)]
            self.step([(number, len(token_ids))], [], 0, None)

    @precondition(lambda self: len(self.alive) <= NUM_SLOTS)
    @rule(number=NUMBERS, token_ids=NEXT)
    def fork(self, number: int, token_ids: list[int]) -> None:
        source = self.chosen(number) if self.alive else None
        if source is None or source.memory is None:
            return
        target = new_sequence(source.token_ids)
        if not self.states.fork(source, target):
            assert self.states.num_free_slots == 0 and target.memory is None
            return
        self.alive.append(target)
        self.go_on(target, token_ids)

    @rule(number=NUMBERS, count=st.integers(0, DRAFT_ROWS + 4), token_ids=NEXT)
    def truncate(self, number: int, count: int, token_ids: list[int]) -> None:
        """Roll back, and go on otherwise."""
        sequence = self.chosen(number) if self.alive else None
        if sequence is None or sequence.memory is None:
            return
        length = max(sequence.num_computed - count, 0)
        if not self.states.truncate(sequence, length):
            assert length not in sequence.memory.window
            self.states.rewind(sequence)
        del sequence.token_ids[length:]
        self.go_on(sequence, token_ids)

    @precondition(lambda self: len(self.kept) < 3)
    @rule(number=NUMBERS, back=st.integers(0, 3))
    def snapshot(self, number: int, back: int) -> None:
        sequence = self.chosen(number) if self.alive else None
        if sequence is None or sequence.memory is None or not sequence.num_computed:
            return
        length = max(sequence.num_computed - back, sequence.memory.window.start)
        self.kept.append(Kept(self.states.snapshot(sequence, length), sequence.token_ids[:length]))

    @precondition(lambda self: self.alive and self.kept)
    @rule(number=NUMBERS, which=NUMBERS, token_ids=NEXT)
    def restore(self, number: int, which: int, token_ids: list[int]) -> None:
        """In place of what a sequence had."""
        sequence, kept = self.chosen(number), self.kept[which % len(self.kept)]
        if self.states.restore(sequence, kept.snapshot):
            sequence.token_ids[:] = kept.token_ids
            self.go_on(sequence, token_ids)

    @precondition(lambda self: self.kept)
    @rule(which=NUMBERS)
    def release(self, which: int) -> None:
        self.states.release(self.kept.pop(which % len(self.kept)).snapshot)

    @precondition(lambda self: len(self.alive) > 2)
    @rule(number=NUMBERS)
    def free(self, number: int) -> None:
        self.states.free(self.alive.pop(number % len(self.alive)))

    @precondition(lambda self: self.alive)
    @rule(number=NUMBERS)
    def preempt(self, number: int) -> None:
        """It is computed again when it next runs."""
        self.states.free(self.chosen(number))

    @precondition(lambda self: hasattr(self, "states"))
    @invariant()
    def memory_is_accounted_for(self) -> None:
        memories = [sequence.memory for sequence in self.alive if sequence.memory]
        slots = sorted([memory.slot for memory in memories] + self.states._free_slots)
        assert slots == list(range(NUM_SLOTS))
        held = [block for memory in memories for block in memory.blocks]
        held += [block for kept in self.kept for block in kept.snapshot.blocks]
        counts = [held.count(block) for block in range(NUM_BLOCKS)]
        assert counts == self.states.blocks._references
        assert sorted(self.states.blocks._free) == [block for block, count in enumerate(counts) if not count]
        self.poison()

    def teardown(self) -> None:
        if hasattr(self, "states"):
            for kept in self.kept:
                self.states.release(kept.snapshot)
            for sequence in self.alive:
                self.states.free(sequence)
            assert (self.states.num_free_slots, self.states.blocks.num_free) == (NUM_SLOTS, NUM_BLOCKS)

    def run(self, entries: list[ScheduledSequence], num_accepted: int, num_padding: int | None) -> None:
        """Run a step, and compare all that it gives."""
        self.poison()
        inputs, _ = build_step_inputs(entries, all_rows=True)
        if num_padding is not None and not self.model.pads_itself:
            inputs = self.padded(inputs, num_padding)
        found, row = self.model.run(inputs, self.states.pool), 0
        for entry in entries:
            sequence, drafts = entry.sequence, entry.sequence.draft_token_ids[: entry.num_drafts]
            read = (*sequence.token_ids[: entry.start + entry.num_tokens - entry.num_drafts], *drafts)
            expected = self.model.reference(read).rows
            for name, values in found.items():
                rows = values[row : row + entry.num_tokens]
                assert_equal(rows, expected[name][entry.start : entry.start + entry.num_tokens], name)
            row += entry.num_tokens
            kept = drafts[:num_accepted]
            sequence.token_ids += kept
            self.states.commit(sequence, entry.num_tokens, entry.num_tokens - entry.num_drafts + len(kept))
            sequence.set_drafts(())
            if entry.num_tokens == 1:
                self.check_states(sequence)

    def go_on(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Run other tokens than before, in a step of all, or leave it to later steps."""
        sequence.token_ids += token_ids[: MAX_LEN - len(sequence.token_ids)]
        if token_ids and token_ids[0] % 4:
            self.step([(self.alive.index(sequence), CHUNK)], [], 0, None)

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether it has a slot and a token to run; the next one is the greedy one."""
        if sequence.memory is None and not self.states.start(sequence):
            return False
        if sequence.num_tokens_left:
            return True
        if len(sequence.token_ids) >= MAX_LEN:
            return False
        sequence.token_ids.append(self.next_token(sequence))
        return True

    def reserve(self, sequence: Sequence, num_tokens: int, busy: list[Sequence]) -> bool:
        """Pages, if need be from sequences that the step does not run."""
        while not self.states.reserve(sequence, num_tokens):
            victims = [other for other in self.alive if other.memory is not None and other not in busy]
            if not victims:
                return False
            self.states.free(victims[-1])
        return True

    def next_token(self, sequence: Sequence) -> int:
        """The greedy one; behind nothing, any."""
        if not sequence.token_ids:
            return FIRST_ID
        return int(self.model.reference(tuple(sequence.token_ids)).rows["logits"][-1].argmax())

    def check_states(self, sequence: Sequence) -> None:
        expected = self.model.reference(tuple(sequence.token_ids[: sequence.num_computed])).states
        for name, value in visible_states(self.states, sequence).items():
            assert_equal(value, expected[name], name)

    def padded(self, inputs: Mapping[str, Tensor], num_padding: int) -> dict[str, Tensor]:
        """As a captured step gets them: padding sequences have slot 0, whoever has it."""
        shape = StepShape.of(inputs)
        num_tokens = shape.num_tokens + 2 * num_padding
        shape = StepShape(shape.num_seqs + num_padding, num_tokens, num_tokens, shape.num_pages + 1)
        layout = InputLayout([spec for spec in self.model.backend.program.inputs if spec.name in inputs], shape)
        buffer = torch.full((layout.num_bytes,), 99, dtype=torch.uint8)
        StagedInputs(layout, buffer).pack(inputs)
        return layout.views(buffer)

    def poison(self) -> None:
        """Fill all memory that nobody holds with what would show."""
        for spec in self.states.pool.specs:
            free = self.states.blocks._free if spec.is_paged else self.states._free_slots
            state = self.states.pool[spec.name]
            state[free] = _GARBAGE.get(state.dtype, torch.nan)


def programs_of(model: Model) -> type[Programs]:
    """Programs that run on ``model``."""
    return type("ProgramsOfModel", (Programs,), {"model": model})
