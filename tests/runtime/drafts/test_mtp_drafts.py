"""The draft head in the serving loop: its text, its states, and its states where sequences part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import bundles
import pytest
import torch
from distributions import assert_same_distribution
from draft_proposers import GivenDraftsBesideHead, Propose, right_up_to
from serving import assert_idle, generated, ids
from torch import Tensor

from qwen4exp_trt.frontend.states import RINGS
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.drafts.config import SpeculativeConfig
from qwen4exp_trt.runtime.drafts.drafting import Drafting
from qwen4exp_trt.runtime.drafts.mtp_proposer import MtpProposer
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.hooks import NoPrefixCache
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence
from qwen4exp_trt.runtime.sequence_memory import Memory
from qwen4exp_trt.runtime.sequence_states import SequenceStates, Snapshot
from qwen4exp_trt.runtime.specs import StateKind
from qwen4exp_trt.runtime.state_pool import StatePool

PROMPTS = ([5, 9, 14, 3, 77, 5, 9], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [40], [7, 8] * 6)
NUM_TOKENS = 18
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
Texts = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def llm(mtp_bundle: Path) -> LLM:
    return LLM(mtp_bundle, speculate="mtp:3")


@pytest.fixture(scope="module")
def texts(mtp_bundle: Path) -> Texts:
    """Greedy outputs of a model whose bundle's draft head is not loaded."""
    outputs = LLM(mtp_bundle).generate([ids(prompt) for prompt in PROMPTS], GREEDY)
    return {tuple(output.prompt_token_ids): generated(output) for output in outputs}


def head_of(llm: LLM) -> MtpProposer:
    assert llm.core.drafting is not None and isinstance(llm.core.drafting.proposer, MtpProposer)
    return llm.core.drafting.proposer


class KeepsStates(NoPrefixCache):
    """Takes what the states say of each sequence when it ends."""

    def __init__(self, states: SequenceStates) -> None:
        self.states = states
        self.kept: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def after_step(self, sequence: RequestSequence) -> None:
        memory = sequence.memory
        assert memory is not None
        if sequence.finish_reason is not None:
            values = meaningful(self.states.pool, memory, sequence.num_computed, self.states.block_size)
            self.kept[tuple(sequence.token_ids)] = values


def meaningful(pool: StatePool, memory: Memory, length: int, block_size: int) -> dict[str, Tensor]:
    """What states say of ``length`` tokens: whatever a next step could read, and the rows of all tokens in pages."""
    values = {}
    blocks = torch.tensor(memory.blocks)
    for spec in pool.specs:
        state, ring = pool[spec.name], 1 if spec.kind is StateKind.STACK_RING else 0
        if spec.is_paged:
            rows = state[blocks]
            dim = 2 if spec.kind is StateKind.KV_CACHE else 1
            per_row = block_size // rows.shape[dim]
            rows = (
                rows.transpose(1, dim).flatten(0, 1) if dim == 1 else rows.transpose(0, 1).flatten(1, 2).transpose(0, 1)
            )
            values[spec.name] = rows[: length // per_row].clone()
        elif ring or spec.kind in RINGS:
            lookback = min(ring or state.shape[1] - DRAFT_ROWS, length)
            values[spec.name] = state[memory.slot, torch.arange(length - lookback, length) % state.shape[1]].clone()
        elif spec.kind is StateKind.RECURRENT_STATE:
            values[spec.name] = state[memory.slot].clone()
    return values


def assert_same_states(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if value.is_floating_point():
            scale = expected[name].abs().max().clamp(min=1e-6)
            assert ((value - expected[name]).abs().max() / scale) <= 1e-5, name
        else:
            assert torch.equal(value, expected[name]), name


def core_of(
    llm: LLM, propose: Propose | None, max_drafts: int, cache: type[NoPrefixCache], num_blocks: int | None = None
) -> EngineCore:
    """A serving loop with the draft head, whose drafts ``propose`` gives, over poisoned states.

    With None its states are kept up, and nothing is drafted.
    """
    head = head_of(llm)
    states = llm.core.backend.states
    for name, state in [*states.items(), *head.states.items()]:  # pyright: ignore[reportOptionalMemberAccess]
        state.fill_(
            torch.nan if state.is_floating_point() else 1 << 20
        ) if "committed_len" not in name else state.zero_()
    drafting = Drafting(SpeculativeConfig("mtp", max_drafts), GivenDraftsBesideHead(propose or (lambda *_: []), head))
    return EngineCore(
        llm.core.backend,
        llm.manifest.limits,
        num_blocks or llm.core.states.blocks.num_blocks,
        llm.manifest.vocab_size,
        (),
        llm.tokenizer,
        prefix_cache=cache,  # pyright: ignore[reportArgumentType]
        drafting=drafting,
    )


def serve(core: EngineCore, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> list[RequestSequence]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    sequences = [core.make_sequence(None, prompt, params) for prompt in prompts]
    for sequence in sequences:
        core.add(sequence)
    for _ in range(1000):
        if not core.scheduler.num_unfinished:
            break
        core.step()
    assert not core.scheduler.num_unfinished
    assert core.scheduler.num_free_slots == core.limits.num_slots
    return sequences


def outputs_of(sequences: Sequence[RequestSequence]) -> Texts:
    return {tuple(each.prompt_token_ids): each.token_ids[len(each.prompt_token_ids) :] for each in sequences}


def the_last_alone(propose: Propose) -> Propose:
    """The last token comes from a step of one row: only then the recurrent state has it."""
    return lambda sequence, count: propose(sequence, max(min(count, sequence.max_len - len(sequence.token_ids) - 2), 0))


@pytest.mark.parametrize("max_drafts", [1, 3, 7])
def test_greedy_text_is_the_undrafted_one(mtp_bundle: Path, texts: Texts, max_drafts: int) -> None:
    llm = LLM(mtp_bundle, speculate=SpeculativeConfig("mtp", max_drafts))
    outputs = llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)
    assert {tuple(output.prompt_token_ids): generated(output) for output in outputs} == texts
    assert all(output.metrics.num_draft_tokens > 0 for output in outputs)
    assert_idle(llm)


@pytest.fixture(scope="module")
def undrafted(llm: LLM, texts: Texts) -> dict[tuple[int, ...], dict[str, Tensor]]:
    """The states at the end of every prompt's text without a draft, each alone."""
    kept = {}
    for prompt in PROMPTS:
        core = core_of(llm, None, 3, KeepsStates)
        assert outputs_of(serve(core, [prompt]))[tuple(prompt)] == texts[tuple(prompt)]
        assert isinstance(core.prefix_cache, KeepsStates)
        kept.update(core.prefix_cache.kept)
    return kept


def check_states(core: EngineCore, undrafted: dict[tuple[int, ...], dict[str, Tensor]], count: int) -> None:
    assert isinstance(core.prefix_cache, KeepsStates)
    assert len(core.prefix_cache.kept) == count
    for token_ids, values in core.prefix_cache.kept.items():
        assert_same_states(values, undrafted[token_ids])


@pytest.mark.parametrize(("max_drafts", "num_right"), [*((3, n) for n in range(4)), (7, 5), (7, 7), (6, None)])
def test_states_are_those_of_undrafted_decoding(
    llm: LLM, texts: Texts, undrafted: dict[tuple[int, ...], dict[str, Tensor]], max_drafts: int, num_right: int | None
) -> None:
    """For every accepted count, in a batch with prompts that come in as chunks: the model's and the draft head's."""
    cycle = itertools.cycle([3, 0, 6, 1, 4])
    right = right_up_to(texts, lambda: next(cycle) if num_right is None else num_right, bundles.VOCAB_SIZE)
    core = core_of(llm, the_last_alone(right), max_drafts, KeepsStates)
    assert outputs_of(serve(core, PROMPTS)) == texts
    check_states(core, undrafted, len(PROMPTS))


def test_the_states_of_the_draft_head_are_those_of_its_pairs(
    llm: LLM, texts: Texts, undrafted: dict[tuple[int, ...], dict[str, Tensor]]
) -> None:
    """Computed at once from the model's stacks and the tokens that follow."""
    prompt = PROMPTS[1]
    token_ids = [*prompt, *texts[tuple(prompt)]]
    core = core_of(llm, None, 3, KeepsStates)
    sequence = core.make_sequence(None, token_ids, GREEDY)
    assert core.states.start(sequence) and core.states.reserve(sequence, len(token_ids))
    head, memory, length = llm.core.backend.draft, sequence.memory, len(token_ids) - 1  # pyright: ignore[reportAttributeAccessIssue]
    assert memory is not None
    for part in range(0, length, 8):
        stop = min(part + 8, length)
        inputs = {
            "input_ids": token_ids[part:stop],
            "positions": [list(range(part, stop))] * 3,
            "query_start_loc": [0, stop - part],
            "seq_lens": [stop],
            "slot_ids": [memory.slot],
            "block_table": [memory.blocks],
            "num_seqs": [1],
            "logits_indices": [0],
        }
        tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in inputs.items()}
        stack = llm.core.backend.run_step(tensors).stack  # pyright: ignore[reportAttributeAccessIssue]
        shifted = torch.tensor(token_ids[part + 1 : stop + 1], dtype=torch.int32)
        head.run_step({**tensors, "input_ids": shifted, "stack": stack})
    found = meaningful(head.states, memory, length, core.states.block_size)
    expected = {name: value for name, value in undrafted[tuple(token_ids)].items() if name in found}
    assert_same_states(found, expected)
    assert len(found) > 2
    core.states.free(sequence)


def test_states_stay_right_through_preemption(
    llm: LLM, texts: Texts, undrafted: dict[tuple[int, ...], dict[str, Tensor]]
) -> None:
    """Pages for no more than two of the sequences."""
    core = core_of(llm, the_last_alone(right_up_to(texts, lambda: 2, bundles.VOCAB_SIZE)), 3, KeepsStates, num_blocks=8)
    sequences = serve(core, PROMPTS)
    assert sum(sequence.metrics.num_preemptions for sequence in sequences) > 0
    assert outputs_of(sequences) == texts
    check_states(core, undrafted, len(PROMPTS))


class KeepsPrefix(KeepsStates):
    """Takes a snapshot of the first sequence at ``length`` tokens as soon as it can, for all that follow."""

    length = 0

    def __init__(self, states: SequenceStates) -> None:
        super().__init__(states)
        self.snapshot: Snapshot | None = None
        self.prefix: list[int] = []

    def after_step(self, sequence: RequestSequence) -> None:
        super().after_step(sequence)
        assert sequence.memory is not None
        if self.snapshot is None and self.length in sequence.memory.window:
            self.snapshot, self.prefix = self.states.snapshot(sequence, self.length), sequence.token_ids[: self.length]

    def restore(self, sequence: RequestSequence) -> int:
        if self.snapshot is None or sequence.token_ids[: self.length] != self.prefix:
            return 0
        assert self.states.restore(sequence, self.snapshot)
        return self.length

    def close(self) -> None:
        assert self.snapshot is not None
        self.states.release(self.snapshot)


@pytest.mark.parametrize("length", [8, 13, 16])
def test_a_restored_prefix_goes_on_with_other_tokens(llm: LLM, texts: Texts, length: int) -> None:
    """The draft head's last pair is of the token that follows now; the pages of the first sequence stay as they are."""
    prompt = PROMPTS[1]
    whole = [*prompt, *texts[tuple(prompt)]]
    other = [*whole[:length], (whole[length] + 1) % 96, 50, 51]
    plain: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for text in (prompt, other):
        core = core_of(llm, None, 3, KeepsStates)
        serve(core, [text])
        plain.update(core.prefix_cache.kept)  # pyright: ignore[reportAttributeAccessIssue]
    known = {tuple(each): list(text[len(each) :]) for each, text in zip((prompt, other), plain, strict=True)}
    propose = the_last_alone(right_up_to(known, lambda: 2, bundles.VOCAB_SIZE))
    core = core_of(llm, propose, 3, type("KeepsOne", (KeepsPrefix,), {"length": length}))
    first, second = (core.make_sequence(None, each, GREEDY) for each in (prompt, other))
    cache = core.prefix_cache
    assert isinstance(cache, KeepsPrefix)
    core.add(first)
    while cache.snapshot is None:
        core.step()
    core.add(second)
    core.step()
    assert second.num_computed > length, "restored"
    while core.scheduler.num_unfinished:
        core.step()
    check_states(core, plain, 2)
    core.close()
    assert core.scheduler.num_free_blocks == core.scheduler.num_blocks


def test_cancelled_requests_leave_nothing(llm: LLM, texts: Texts) -> None:
    stream = llm.stream(ids(PROMPTS[0]), GREEDY)
    next(stream), next(stream)
    stream.close()
    assert_idle(llm)
    assert generated(llm.generate(ids(PROMPTS[1]), GREEDY)[0]) == texts[tuple(PROMPTS[1])]


def test_a_request_whose_drafts_are_off_keeps_its_states_complete(
    llm: LLM, texts: Texts, undrafted: dict[tuple[int, ...], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen4exp_trt.runtime.drafts.acceptance.GIVE_UP_AFTER", 3)
    core = core_of(llm, the_last_alone(right_up_to(texts, lambda: 0, bundles.VOCAB_SIZE)), 3, KeepsStates)
    sequences = serve(core, PROMPTS)
    assert all(sequence.acceptance.is_off for sequence in sequences)
    check_states(core, undrafted, len(PROMPTS))


def test_a_seeded_request_is_reproducible_and_drafts_are_accepted(mtp_bundle: Path) -> None:
    """At this temperature the random head and the random model agree often enough."""
    llm = LLM(mtp_bundle, speculate="mtp:3")
    params = SamplingParams(temperature=3.0, seed=5, max_tokens=40, ignore_eos=True, logprobs=1)
    first, second = (llm.generate(ids(PROMPTS[0]), params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert 0 < first.metrics.num_accepted_tokens < first.metrics.num_draft_tokens
    score = llm.score([*PROMPTS[0], *generated(first)]).log_softmax(-1)
    for row, (token, entry) in enumerate(zip(generated(first), first.outputs[0].logprobs or [], strict=True)):
        expected = float(score[len(PROMPTS[0]) - 1 + row, token])
        assert entry[token].logprob == pytest.approx(expected, abs=1e-4), "of accepted drafts, too"


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampled_text_has_the_distribution_of_undrafted_text(mtp_bundle: Path, top_p: float) -> None:
    """Of the first two tokens that drafts can decide: by classes of ids, since there are too many pairs."""
    outcomes = []
    for speculate, seeds in ((None, range(500)), ("mtp:2", range(500, 1000))):
        llm = LLM(mtp_bundle, speculate=speculate)
        params = [
            SamplingParams(temperature=2.0, top_p=top_p, top_k=100, seed=seed, max_tokens=4, ignore_eos=True)
            for seed in seeds
        ]
        outputs = llm.generate([ids(PROMPTS[0])] * len(params), params)
        outcomes.append([tuple(token % 5 for token in generated(output)[1:3]) for output in outputs])
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        assert (accepted > 50) == (speculate is not None)
    assert_same_distribution(*outcomes)


@pytest.mark.slow
def test_a_reduced_vocabulary_drafts_its_own_ids(mtp_bundle: Path, tmp_path: Path, texts: Texts) -> None:
    checkpoint = bundles.mtp_checkpoint(mtp_bundle.parent)
    llm = LLM(bundles.build(checkpoint, tmp_path / "reduced", draft_vocab_size=100), speculate="mtp:3")
    allowed = head_of(llm)._sampler.token_ids
    assert allowed is not None and len(allowed) == 100
    drafted: set[int] = set()
    core_propose = head_of(llm).propose

    def spy(wanted: Sequence[tuple[RequestSequence, int]]) -> None:
        core_propose(wanted)
        drafted.update(token for sequence, _ in wanted for token in sequence.draft_token_ids)

    head_of(llm).propose = spy  # pyright: ignore[reportAttributeAccessIssue]
    outputs = llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)
    assert {tuple(output.prompt_token_ids): generated(output) for output in outputs} == texts
    assert drafted and drafted <= set(allowed.tolist())
    sampled = SamplingParams(temperature=3.0, seed=1, max_tokens=40, ignore_eos=True, repetition_penalty=1.1)
    (output,) = llm.generate(ids(PROMPTS[0]), sampled)
    assert output.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("length", [24, 31])
def test_a_known_prompt_that_needs_every_page_runs(mtp_bundle: Path, length: int) -> None:
    """The head writes into the last page of what is restored, and the pool has none for a copy of it."""
    prompt, params = list(range(3, 3 + length)), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    core = LLM(mtp_bundle, speculate="mtp:3", num_blocks=-(-(length + 16) // 8)).core
    for _ in range(3):
        sequence = core.make_sequence(None, prompt, params)
        core.add(sequence)
        for _ in range(40):
            core.step()
        assert sequence.finish_reason == "length"
