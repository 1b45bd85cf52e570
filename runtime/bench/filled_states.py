"""Sequences that have a long context without its prompt being computed: states with random content."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.runtime.bench.random_weights import fill_e4m3
from qwen4exp_trt.runtime.hooks import Match, NoPrefixCache
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_states import SequenceStates
from qwen4exp_trt.runtime.specs import StateKind, StateSpec
from qwen4exp_trt.runtime.state_pool import StatePool


class FilledCache(NoPrefixCache):
    """Has the states of everybody's first ``context`` tokens: whatever is in the pages."""

    def __init__(self, states: SequenceStates, context: int) -> None:
        self._states, self._context = states, context

    def match(self, sequence: Sequence) -> Match:
        return Match(self._context, 0)

    def restore(self, sequence: Sequence) -> int:
        assert self._states.reserve(sequence, self._context), "too few pages"
        self._states.commit(sequence, self._context)
        return self._context


def fill_states(states: StatePool, context: int, vocab_size: int, seed: int = 0) -> None:
    """As if every slot's sequence had ``context`` tokens, with random content in all pages."""
    fill_pages(states, seed)
    fill_slots(states, context, vocab_size, seed)


def fill_pages(states: StatePool, seed: int = 0) -> None:
    """Random content in all pages."""
    for spec in states.specs:
        if spec.is_paged:
            _fill_random(states[spec.name], seed)


def fill_slots(states: StatePool, context: int, vocab_size: int, seed: int = 0) -> None:
    """States of every slot as if its sequence had ``context`` tokens."""
    for spec in states.specs:
        if not spec.is_paged:
            _fill_slots(spec, states[spec.name], context, vocab_size, seed)


def _fill_slots(spec: StateSpec, state: Tensor, context: int, vocab_size: int, seed: int) -> None:
    match spec.kind:
        case StateKind.COMMITTED_LEN:
            state[:, 0], state[:, 1] = context, 0
        case StateKind.NGRAM_IDS:
            state.random_(vocab_size, generator=_generator(state, seed))
        case StateKind.INDEX_POSITION_RING:
            state.fill_(context)
        case StateKind.RECURRENT_STATE:
            state.normal_(std=0.05, generator=_generator(state, seed))
        case _:
            _fill_random(state, seed)


def _fill_random(state: Tensor, seed: int) -> None:
    generator = _generator(state, seed)
    if state.dtype == torch.float8_e4m3fn:
        fill_e4m3(state, generator)
    else:
        state.normal_(generator=generator)


def _generator(state: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(state.device).manual_seed(seed)
