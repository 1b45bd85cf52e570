"""The text of tiny models' programs after each pass, as stored in tests/golden.

A change of it is a change of what the compiler does: rewrite the files with ``--update-golden`` and review the diff.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from model_zoo import tiny_config_dict

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.runtime.weight_formats import WeightFormat

GOLDEN = Path(__file__).parents[1] / "golden"
PASSES = [graph_pass.name for graph_pass in make_pipeline(Quantization())]
STAGES = {name: f"{index:02d}_{name}.py" for index, name in enumerate(["input", *PASSES])}
TABLE = "layers.0.ple.ple_embedding.ngram_embedding.weight"


@dataclass(frozen=True)
class Case:
    """A tiny model, how it is quantized, and the stages whose text is stored."""

    config: dict[str, Any]
    quantization: Quantization
    stages: tuple[str, ...]


CASES = {
    # Three layers: one plain, one with the n-gram embedding, one with full attention and an indexer.
    "bf16": Case(
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3},
        Quantization(),
        tuple(stage for stage in STAGES if stage not in ("choose_formats", "quantize_activations")),
    ),
    # One layer, in which everything that can be quantized is.
    "nvfp4-w4a4": Case(
        {"layer_types": ["linear_attention"], "num_hidden_layers": 1, "ple_layer_ids": [1]},
        Quantization(
            dict.fromkeys(
                (
                    *(f"layers.0.linear_attn.{leaf}.weight" for leaf in ("in_proj_qkv", "in_proj_z", "out_proj")),
                    *(f"layers.0.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")),
                    *(f"layers.0.mlp.shared_expert.{leaf}_proj.weight" for leaf in ("gate", "up", "down")),
                    *("lm_head.weight", TABLE),
                ),
                WeightFormat.NVFP4,
            ),
            table_scales={TABLE: 4},
            input_scales={
                "layers.0.linear_attn.in_proj_qkv_in_proj_z": 0.5,
                "layers.0.linear_attn.out_proj.nvfp4_linear": 0.25,
            },
        ),
        ("choose_formats", "quantize_activations", "drop_dead_code"),
    ),
}
FILES = [f"{name}/{STAGES[stage]}" for name, case in CASES.items() for stage in case.stages]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case, with the text after every pass."""
    folder = tmp_path_factory.mktemp("dump")
    for name, case in CASES.items():
        config = ModelConfig.from_dict(tiny_config_dict(**case.config), name)
        program = export_program(config, "bfloat16", block_size=16)
        PassManager(make_pipeline(case.quantization), dump_dir=folder / name).run(program)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_the_text_is_the_stored_one(name: str, dumped: Path, request: pytest.FixtureRequest) -> None:
    text = (dumped / name).read_text()
    if request.config.getoption("--update-golden"):
        (GOLDEN / name).parent.mkdir(exist_ok=True)
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text(), f"{name} changed; `make golden` rewrites it"


def test_nothing_else_is_stored(request: pytest.FixtureRequest) -> None:
    stored = {path.relative_to(GOLDEN).as_posix(): path for path in GOLDEN.rglob("*") if path.is_file()}
    stale = [path for name, path in stored.items() if name not in FILES]
    if request.config.getoption("--update-golden"):
        for path in stale:
            path.unlink()
        stale = []
    assert stale == []
