"""The indexes of the published quantized releases, at full size, from shapes alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import TABLE
from released_model import released_config
from torch import Tensor

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights, resolve_weights
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weights import sources_of

P = "model.language_model."

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape."""


class Headers(Checkpoint):
    """A checkpoint of headers alone, whose scales are all 1."""

    def __init__(self, path: Path, headers: Header) -> None:
        super().__init__(path, (), {})
        self.headers = headers
        self.one = {"F32": torch.ones(()), "BF16": torch.ones((), dtype=torch.bfloat16)}

    @property
    def names(self) -> list[str]:
        return sorted(self.headers)

    def dtype(self, name: str) -> str:
        return self.headers[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.headers[name][1]

    def tensor(self, name: str) -> Tensor:
        dtype, shape = self.headers[name]
        return self.one[dtype].expand(shape)


def nvfp4_headers(name: str, rows: int, columns: int) -> Header:
    return {
        f"{name}.weight": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
        f"{name}.input_scale": ("F32", ()),
    }


def fp8_headers(name: str, rows: int, columns: int) -> Header:
    grid = (-(-rows // 128), -(-columns // 128))
    return {f"{name}.weight": ("F8_E4M3", (rows, columns)), f"{name}.weight_scale_inv": ("BF16", grid)}


def released_headers(
    config: ModelConfig, experts: Callable[[str, int, int], Header], mtp_experts: Callable[[str, int, int], Header]
) -> Header:
    """The index of a release but for the hash constants: experts one by one, the table in FP8 shards, the rest BF16."""
    hidden, moe = config.hidden_size, config.moe_intermediate_size
    projections = {"gate_proj": (moe, hidden), "up_proj": (moe, hidden), "down_proj": (hidden, moe)}
    headers: Header = {}
    table = f"{P}layers.1.{TABLE}"
    for name, shape in expected_weights(config).items():
        stored = name if name == "lm_head.weight" else f"{P}{name}"
        if name.endswith("experts.gate_up_proj"):
            base = stored.removesuffix(".gate_up_proj")
            for e in range(config.num_experts):
                for leaf, extents in projections.items():
                    headers |= experts(f"{base}.{e}.{leaf}", *extents)
        elif name.endswith(f"{TABLE}.weight"):
            rows = shape[0] // config.split_ngram_parts
            shards = range(config.split_ngram_parts)
            headers |= {f"{table}.shard_{k}.weight": ("F8_E4M3", (rows, shape[1])) for k in shards}
            headers[f"{table}.weight_scale"] = ("BF16", (1,))
        elif "experts.down_proj" not in name:
            headers[stored] = ("BF16", shape)
    headers |= {f"model.visual.{i}": ("BF16", (1,)) for i in range(333)}
    headers |= {f"mtp.{i}": ("BF16", (1,)) for i in range(29)}
    for e in range(config.num_experts):
        for leaf, extents in projections.items():
            headers |= mtp_experts(f"mtp.layers.0.mlp.experts.{e}.{leaf}", *extents)
    return headers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "count", "num_scales"),
    [
        pytest.param(nvfp4_headers, 299_545, 2, id="nvfp4"),
        pytest.param(fp8_headers, 152_089, 1, id="fp8"),
    ],
)
def test_released_indexes_are_resolved_fast(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    experts: Callable[[str, int, int], Header],
    count: int,
    num_scales: int,
) -> None:
    """The counts are the published ones; 3 of each are hash constants."""
    monkeypatch.setattr(TensorReader, "tensors", lambda self, names: list(map(self.checkpoints[0].tensor, names)))
    config = released_config()
    checkpoint = Headers(tmp_path, released_headers(config, experts, fp8_headers))
    assert len(checkpoint.headers) + 3 == count
    begin = time.process_time()
    resolved = resolve_weights(config, checkpoint)
    assert time.process_time() - begin < 30
    num_experts = 48 * 512 * 3
    sources = sources_of(resolved.weights["layers.47.mlp.experts.gate_up_proj"].value)
    assert len(sources) == 512 * 2 * (1 + num_scales)
    assert len(resolved.set_aside["activation scales"]) == (num_experts if experts is nvfp4_headers else 0)
    assert len(resolved.set_aside["mtp"]) == 29 + 512 * 3 * 2
