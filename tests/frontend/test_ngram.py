from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import build_hf_model, tiny_config_dict

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.ngram import NgramHash, ngram_hash, primes_from

RELEASED = Path(__file__).parents[1] / "fixtures" / "released_config.json"

EOS = 248044
RELEASED_ROWS = [
    (248045, (13981229, 30076798, 299757935, 312970430)),
    (846, (4908448, 36872991, 284073139, 308659387)),
    (198, (4582007, 37691206, 296838250, 317942745)),
    (EOS, (16849591, 37537304, 284504606, 306781843)),
    (846, (8043531, 20619273, 282500374, 306464175)),
    (198, (4582007, 37691206, 293799519, 310031334)),
    (248056, (17163155, 35478550, 289577452, 310675026)),
]
"""Token id -> its first two and last two table rows, in one sequence from a fresh state."""


@pytest.fixture(scope="module")
def released() -> NgramHash:
    return ngram_hash(ModelConfig.from_file(RELEASED), layer=1)


def table_rows(constants: NgramHash, context: list[int]) -> list[int]:
    """The rows of the newest token, with ``context`` newest first and as long as the longest n-gram."""
    mixes, mix = [], 0
    for i, (token_id, multiplier) in enumerate(zip(context, constants.multipliers, strict=True)):
        mix ^= token_id * multiplier
        mixes += [mix] if i else []
    heads = len(constants.vocab_sizes) // len(mixes)
    sizes = zip(constants.vocab_sizes, constants.offsets, strict=True)
    return [mixes[h // heads] % size + offset for h, (size, offset) in enumerate(sizes)]


def test_released_constants(released: NgramHash) -> None:
    assert released.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert released.vocab_sizes[:3] == (20000003, 20000023, 20000033)
    assert released.vocab_sizes[13:] == (20000159, 20000161, 20000171)
    assert released.offsets[:3] == (0, 20000003, 40000026)
    assert released.offsets[-1] == 300001275
    assert released.offsets[-1] + released.vocab_sizes[-1] == 320_001_446
    assert released.num_rows == 320_001_536 == 128 * 2_500_012


def test_trap_4_released_row_ids_pair_the_first_multiplier_with_the_current_token(released: NgramHash) -> None:
    context = [EOS, EOS]
    for token_id, expected in RELEASED_ROWS:
        rows = table_rows(released, [token_id, *context])
        assert (*rows[:2], *rows[-2:]) == expected
        context = [EOS, EOS] if token_id == EOS else [token_id, context[0]]


def test_trap_9_the_constants_do_not_survive_float32(released: NgramHash) -> None:
    assert [int(torch.tensor(m, dtype=torch.float32)) for m in released.multipliers] != list(released.multipliers)
    assert all(multiplier * 248319 < 2**63 for multiplier in released.multipliers)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"seed": 99, "vocab_size": 200},
        {"ngram_size": 2, "heads_per_ngram": 4},
        {"ngram_size": 4, "ple_embed_dim": 48},
        {"make_ngram_vocab_size_divisible_by": 7, "split_ngram_parts": 3},
        {"ngram_vocab_size_base": 1},
        {"ple_layer_ids": [3, 1]},
    ],
)
def test_same_constants_as_transformers(overrides: dict[str, Any]) -> None:
    data = tiny_config_dict(**overrides)
    config = ModelConfig.from_dict(data, "config.json")
    buffers = dict(build_hf_model(data).named_buffers())
    for layer in config.ple_layers:
        constants = ngram_hash(config, layer)
        embedding = f"model.layers.{layer}.ple.ple_embedding"
        assert buffers[f"{embedding}.layer_multipliers"].tolist() == list(constants.multipliers)
        assert buffers[f"{embedding}.ngram_heads_vocab_sizes"].tolist() == list(constants.vocab_sizes)
        assert buffers[f"{embedding}.ngram_heads_offsets"].tolist() == list(constants.offsets)


def test_only_ple_layers_have_constants() -> None:
    with pytest.raises(ValueError):
        ngram_hash(ModelConfig.from_dict(tiny_config_dict(), "config.json"), layer=0)


def test_primes_from() -> None:
    primes = primes_from(-3)
    assert [next(primes) for _ in range(8)] == [2, 3, 5, 7, 11, 13, 17, 19]
    assert next(primes_from(23)) == 23
    assert next(primes_from(24)) == 29
