"""BF16 bundles against transformers; `hf_parity.check_bf16` states and justifies the bounds."""

from __future__ import annotations

import pytest
import torch
from hf_parity import Bf16Errors, bf16_logits, build_llm, check_bf16, random_prompt
from model_zoo import tiny_config_dict, write_hf_checkpoint
from torch import Tensor

pytestmark = pytest.mark.trt

SEEDS = range(3)
PROMPTS = [random_prompt(length, seed=length, eos=(0, length // 2)) for length in (3, 19, 20, 61, 120)]


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each seed of the weights: exact, transformers in BF16, ours."""
    folder = tmp_path_factory.mktemp("bf16")
    for seed in SEEDS:
        write_hf_checkpoint(folder / f"{seed}", tiny_config_dict(dtype="bfloat16"), seed, "bfloat16")
    return [
        bf16_logits(folder / f"{seed}", build_llm(folder / f"{seed}", folder / f"bundle-{seed}", "bfloat16"), PROMPTS)
        for seed in SEEDS
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_bf16_costs_no_more_than_in_transformers(logits: list[tuple[Tensor, Tensor, Tensor]], seed: int) -> None:
    check_bf16(*logits[seed])


def test_the_bf16_bounds_notice_twice_the_error(logits: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    exact, theirs, _ = logits[0]
    with pytest.raises(AssertionError, match="Bf16Errors"):
        check_bf16(exact, theirs, exact + 2 * (theirs - exact))


def test_the_bf16_reference_rounds(logits: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """The exact logits are of the same weights: the reference's error is rounding (1%), not another model (100%)."""
    for exact, theirs, _ in logits:
        errors = Bf16Errors.of(exact, theirs)
        assert 1e-3 < errors.median < 3e-2, errors
        assert not torch.equal(exact, theirs)
