"""A request whose logits are NaN says in which module that began, with ``debug_nan``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import generated, ids, loaded_backend

from qwen4exp_trt.errors import BundleError, DroppedError
from qwen4exp_trt.runtime import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [ids(list(range(20, 40))), ids([7, 8, 9])]


@pytest.fixture(scope="module")
def watched(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle, debug_nan=True)


@contextmanager
def poisoned(llm: LLM, name: str, row: Any = 0) -> Iterator[str]:
    """NaN in a weight or state; its full name."""
    backend = loaded_backend(llm)
    tensors = {**backend.weights, **backend.states}
    (found,) = (each for each in tensors if each == name or each.startswith(f"{name}:") or each.endswith(name))
    healthy = tensors[found][row].clone()
    tensors[found][row] = torch.nan
    yield found
    tensors[found][row] = healthy


def dropped(llm: LLM, prompt: Any = PROMPTS[0]) -> str:
    with pytest.raises(DroppedError) as raised:
        llm.generate(prompt, GREEDY)
    return str(raised.value)


def weight_of(llm: LLM, prefix: str) -> str:
    backend = loaded_backend(llm)
    return next(name for name in backend.weights if name.startswith(prefix))


@pytest.mark.parametrize(
    ("prefix", "module"),
    [
        ("layers.0.mlp.experts.down_proj", "layers.0.mlp.moe"),
        ("layers.1.self_attn.o_proj", "layers.1.self_attn.o_proj.linear"),
        ("layers.1.mlp.gate", "layers.1.mlp.moe"),
        ("lm_head", "lm_head.linear"),
    ],
)
def test_a_poisoned_weight_is_named_with_the_first_module_that_shows_it(watched: LLM, prefix: str, module: str) -> None:
    name = weight_of(watched, prefix)
    with poisoned(watched, name, ...):
        message = dropped(watched)
    assert (
        f"the first result that is not finite is that of {module}, of whose weights {name} have such values" in message
    )


def test_text_is_the_same_and_nothing_is_said_of_a_healthy_model(watched: LLM, llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    assert [generated(each) for each in watched.generate(PROMPTS, GREEDY)] == [generated(each) for each in expected]


def test_a_state_that_is_damaged_between_steps_hits_its_own_request(watched: LLM, llm: LLM) -> None:
    """The other request of the step goes on, and its rows are not taken for the damaged one's."""
    expected = generated(llm.generate(PROMPTS[1], GREEDY)[0])
    streams = [watched.stream(prompt, GREEDY) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    damaged = watched.core.scheduler.running[0]
    assert damaged.memory is not None
    with (
        poisoned(watched, "layers.0.linear_attn.recurrent_state", damaged.memory.slot),
        pytest.raises(DroppedError, match=r"not finite is that of layers\.0\.linear_attn\.gated_delta_rule$"),
    ):
        list(streams[0])
    assert [token for chunk in streams[1] for token in chunk.token_ids] == expected[1:]


def test_what_began_in_an_earlier_chunk_is_named(watched: LLM) -> None:
    """The weight is healthy again when the logits are computed: the NaN comes through the states."""
    sequence = watched.make_sequence(PROMPTS[0], GREEDY)
    watched.core.add(sequence)
    with poisoned(watched, weight_of(watched, "layers.0.mlp.experts.down_proj"), ...):
        watched.core.step()
    while sequence.error is None and sequence.finish_reason is None:
        watched.core.step()
    assert "the first result that is not finite is that of layers.0.mlp.moe" in str(sequence.error)


def test_without_it_the_message_says_how_to_find_out(llm: LLM) -> None:
    with poisoned(llm, weight_of(llm, "lm_head"), ...):
        assert dropped(llm).endswith("debug_nan=True (--debug-nan) says in which module it began")


def test_an_engine_cannot_be_watched(tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"debug_nan \(--debug-nan\) looks at the result of each op, and the backend"):
        LLM(tiny_bundle, backend="tensorrt", debug_nan=True)
