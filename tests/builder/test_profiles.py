"""Shape ranges of the network inputs."""

from __future__ import annotations

import pytest

from qwen4exp_trt.builder.profiles import Extent, ShapeRange, optimization_profiles, profile_dims
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.export import input_specs
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.specs import StateKind, StateSpec, TensorSpec

LIMITS = EngineLimits(max_batch_size=3, max_seq_len=1000, prefill_chunk=128, block_size=64)
KV_CACHE = StateSpec("layers.3.self_attn.kv_cache", StateKind.KV_CACHE, 3, ("num_blocks", 2, 64, 2, 16), "bfloat16")


def test_token_ranges() -> None:
    dims = profile_dims(LIMITS)
    assert list(dims) == ["decode", "prefill"]
    assert dims["decode"]["T"] == Extent(1, 3, 24)
    assert dims["prefill"]["T"] == Extent(1, 128, 128)


def test_prefill_covers_a_full_decode_step() -> None:
    limits = EngineLimits(max_batch_size=3, max_seq_len=1000, prefill_chunk=1, block_size=64)
    dims = profile_dims(limits)
    assert dims["prefill"]["T"].max == dims["decode"]["T"].max == 24


@pytest.mark.parametrize("limits", [LIMITS, EngineLimits(1, 1, 1, 1), EngineLimits(4096, 2**24, 65536, 16)])
def test_ranges_are_ordered_and_query_start_loc_has_one_more_than_the_batch(limits: EngineLimits) -> None:
    for dims in profile_dims(limits).values():
        assert all(1 <= extent.min <= extent.opt <= extent.max for extent in dims.values())
        assert dims["B_plus_1"] == Extent(*(size + 1 for size in dims["B"]))
        assert dims["max_blocks"].max == limits.blocks_per_seq


def test_every_dynamic_tensor_gets_shapes_and_static_ones_none() -> None:
    decode = optimization_profiles(LIMITS, (*input_specs(), KV_CACHE))["decode"]
    assert decode.keys() == {spec.name for spec in (*input_specs(), KV_CACHE)} - {"num_seqs"}
    assert decode["positions"] == ShapeRange((3, 1), (3, 3), (3, 24))
    assert decode["block_table"] == ShapeRange((1, 1), (3, 16), (3, 16))
    assert decode[KV_CACHE.name].opt == (48, 2, 64, 2, 16)


def test_a_dim_without_a_range_is_named() -> None:
    with pytest.raises(BuildError, match="pixels has the dynamic dims P, which have no range"):
        optimization_profiles(LIMITS, [TensorSpec("pixels", ("P", 3), "float32")])
