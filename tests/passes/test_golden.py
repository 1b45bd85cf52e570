"""The text of a tiny model's program after each pass, as stored in tests/golden.

A change of it is a change of what the compiler does: rewrite the files with ``--update-golden`` and review the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from model_zoo import tiny_config_dict

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = [
    "00_input.py",
    *(f"{index:02d}_{graph_pass.name}.py" for index, graph_pass in enumerate(make_pipeline(Quantization()), 1)),
]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: one plain, one with the n-gram embedding, one with full attention and an indexer."""
    layer_types = ["linear_attention", "linear_attention", "full_attention"]
    config = ModelConfig.from_dict(tiny_config_dict(num_hidden_layers=3, layer_types=layer_types), "golden")
    folder = tmp_path_factory.mktemp("dump")
    PassManager(make_pipeline(Quantization()), dump_dir=folder).run(export_program(config, "bfloat16", block_size=16))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_stored_one(name: str, dumped: Path, request: pytest.FixtureRequest) -> None:
    text = (dumped / name).read_text()
    if request.config.getoption("--update-golden"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text(), f"{name} changed; `make golden` rewrites it"


def test_nothing_else_is_stored(request: pytest.FixtureRequest) -> None:
    stale = [path for path in GOLDEN.iterdir() if path.name not in NAMES]
    if request.config.getoption("--update-golden"):
        for path in stale:
            path.unlink()
        stale = []
    assert stale == []
