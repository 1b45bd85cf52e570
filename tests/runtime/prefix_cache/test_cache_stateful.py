"""Random programs of sequences over a prefix cache: what is restored is right, and nothing is lost or over budget."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cache_simulation import NUM_PAGES, SLOTS, SimulatedSequence, Simulation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=40),
    st.builds(lambda head, tail: [0] * head + tail, st.integers(0, 20), st.lists(st.integers(0, 1), max_size=9)).filter(
        bool
    ),
)

indices, small = st.integers(0, 10**6), st.integers(0, 9)


class CacheMachine(RuleBasedStateMachine):
    @initialize(limits=st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 0, 2, 50])))
    def begin(self, limits: tuple[int, int, int]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.simulation = Simulation(limits, self.folder / "cache")

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.simulation.cache.close()

    @rule(token_ids=prompts)
    def start(self, token_ids: list[int]) -> None:
        self.simulation.start(token_ids)

    def pick(self, index: int) -> SimulatedSequence | None:
        """One that runs. What runs may depend on how fast the disk is, so no draw may depend on it."""
        running = self.simulation.running
        return running[index % len(running)] if running else None

    @rule(index=indices, chunk=st.integers(1, 30), accepted=st.integers(0, 5), token=st.integers(0, 1))
    def step(self, index: int, chunk: int, accepted: int, token: int) -> None:
        if sequence := self.pick(index):
            self.simulation.step(sequence, chunk, accepted, token)

    @rule(index=indices)
    def run_to_end(self, index: int) -> None:
        if sequence := self.pick(index):
            self.simulation.run_to_end(sequence)

    @rule(index=indices, next_turn=st.lists(st.integers(0, 1), max_size=6))
    def finish(self, index: int, next_turn: list[int]) -> None:
        """A sequence ends, and its conversation goes on."""
        if sequence := self.pick(index):
            self.simulation.finish(sequence)
            self.simulation.start(sequence.token_ids + next_turn)

    @rule(index=indices)
    def fail(self, index: int) -> None:
        if sequence := self.pick(index):
            sequence.error = RuntimeError("broken")
            self.simulation.finish(sequence)

    @rule(count=st.integers(1, NUM_PAGES))
    def evict(self, count: int) -> None:
        self.simulation.cache.evict(count)

    @rule()
    def flush(self) -> None:
        self.simulation.cache.flush()

    @rule()
    def reopen(self) -> None:
        self.simulation.reopen()

    @rule(
        donor=st.integers(0, 9), victim=st.integers(0, 9), place=indices, flip=st.integers(0, 7), is_torn=st.booleans()
    )
    def damage(self, donor: int, victim: int, place: int, flip: int, is_torn: bool) -> None:
        """A file of the cache is torn, or has the content of another one, or a flipped bit."""
        self.simulation.cache.flush()
        files = sorted(self.folder.glob("cache/*/*.blob"))
        if not files:
            return
        whole = bytearray(files[donor % len(files)].read_bytes())
        if not whole:  # torn before
            return
        whole[place % len(whole)] ^= 1 << flip if donor == victim else 0
        files[victim % len(files)].write_bytes(whole[: place % len(whole)] if is_torn else whole)

    @rule(is_short=st.booleans())
    def memory(self, is_short: bool) -> None:
        """No copy can be made for a while."""
        self.simulation.is_memory_short = is_short

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    @rule()
    def everything_comes_back(self) -> None:
        for sequence in list(self.simulation.running):
            self.simulation.finish(sequence)
        self.simulation.cache.evict(NUM_PAGES)
        states = self.simulation.states
        assert (states.blocks.num_free, len(states.free_slots)) == (NUM_PAGES, SLOTS)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
