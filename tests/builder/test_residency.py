"""Bundles whose n-gram table is on the device, in the host's memory or on disk: what they hold, and that they agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import onnx
import pytest
import torch
from quantized_checkpoints import store_fp8, write_quantized
from safetensors.torch import load_file, save_file

from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.manifest import ONNX_FILE, Manifest
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import NgramRowsSpec, PleResidency

TABLE = "layers.0.ple.ple_embedding.ngram_embedding"
PROMPTS = ["the quick brown fox", "the quick brown dog", "a lazy fox jumps over"]

pytestmark = pytest.mark.usefixtures("quick_builds")


def write_fp8(folder: Path, tiny: Path) -> None:
    write_quantized(folder, "FP8", bundles.config_dict())
    bundles.write_text_files(folder)


def write_float(folder: Path, tiny: Path) -> None:
    shutil.copytree(tiny, folder)


FORMATS: dict[str, tuple[Callable[[Path, Path], None], dict[str, Any], list[str]]] = {
    "bf16": (write_float, {}, [f"{TABLE}.weight"]),
    "fp8": (write_fp8, {}, [f"{TABLE}.codes"]),
    "nvfp4": (write_fp8, {"ple": "nvfp4"}, [f"{TABLE}.codes", f"{TABLE}.block_scales"]),
}
"""How the checkpoint is written, the options of the build, and the weights that are the table."""


def texts_of(bundle: Path, prompts: list[str] = PROMPTS, max_tokens: int = 20, **options: Any) -> list[list[int]]:
    """Greedy tokens, of all prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in LLM(bundle, **options).generate(prompts, params)]


@pytest.mark.parametrize(
    "table", ["bf16", *(pytest.param(table, marks=pytest.mark.slow) for table in ("fp8", "nvfp4"))]
)
def test_residencies_of_a_table(table: str, checkpoint: Path, tmp_path: Path) -> None:
    write, options, table_weights = FORMATS[table]
    write(tmp_path / "checkpoint", checkpoint)
    programs: dict[str, Program] = {}
    for residency in PleResidency:
        values = {"activation_dtype": "float32", **bundles.LIMITS} | options
        built = BuildOptions(
            checkpoint=tmp_path / "checkpoint",
            output=tmp_path / residency,
            ple_residency=residency,
            verify=(table, residency) == ("nvfp4", "disk"),
            **values,
        )
        programs[residency] = build_bundle(built).program
        manifest = Manifest.load(tmp_path / residency)
        assert manifest.ple_residency == residency
        assert sorted(manifest.host_weights) == (sorted(table_weights) if residency == "host" else [])
    device, host, disk = programs.values()
    assert device.tables == host.tables
    assert {spec.name for spec in device.weights} - {spec.name for spec in disk.weights} > set(table_weights)
    assert [spec for spec in disk.weights if "ngram" in spec.name] == []
    (looked_up,) = [spec for spec in disk.inputs if isinstance(spec, NgramRowsSpec)]
    assert looked_up.name in [value.name for value in onnx.load(tmp_path / "disk" / ONNX_FILE).graph.input]
    assert looked_up.name in Manifest.load(tmp_path / "disk").profiles["decode"]
    rings = [f"{looked_up.name.rpartition('.')[0]}.ngram_ids"]
    assert [name for name in LLM(tmp_path / "disk").core.backend.states if "ngram_ids" in name] == rings
    expected = texts_of(tmp_path / "device")
    assert texts_of(tmp_path / "host") == texts_of(tmp_path / "disk") == expected
    assert texts_of(tmp_path / "disk", row_cache_bytes=500) == expected


def test_a_residency_is_printed(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--activation-dtype", "float32", "--max-seq-len", "64", "--ple-residency", "disk", "--config-only"]
    assert main([str(checkpoint), "-o", str(tmp_path / "bundle"), *argv]) == 0
    out = capsys.readouterr().out
    assert "n-gram table checkpoint on disk, activations float32" in out
    tables = json.loads((tmp_path / "bundle" / "program" / "tables.json").read_text())
    assert tables["inputs"][-1]["gather"] == "ple_gather" and len(tables["inputs"][-1]["head_sizes"]) == 4


def test_calibration_reads_rows_from_disk(checkpoint: Path, tmp_path: Path) -> None:
    """Its scales are those of a table in memory."""
    write_fp8(tmp_path / "checkpoint", checkpoint)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 3)
    scales = []
    for residency in ("device", "disk"):
        options = {"precision": "nvfp4-w4a4", "calibration": text, "ple_residency": residency}
        bundles.build(tmp_path / "checkpoint", tmp_path / residency, **options)
        calibration = Manifest.load(tmp_path / residency).calibration
        assert calibration is not None
        scales.append(calibration.scales)
    assert scales[0] == scales[1] != {}


def write_demo(folder: Path, table: str) -> None:
    """The demo checkpoint, with its table in FP8 if asked for: shards with a scale for all."""
    shutil.copytree(bundles.DEMO_CHECKPOINT, folder)
    if table != "fp8":
        return
    files = {path: load_file(path) for path in folder.glob("*.safetensors")}
    ((path, tensors),) = [
        (path, tensors) for path, tensors in files.items() if any("ngram" in name for name in tensors)
    ]
    shards = [name for name in tensors if "ngram_embedding.shard_" in name]
    stored = store_fp8(torch.cat([tensors[name].float() for name in shards])).parts
    parts = stored["weight"].split([len(tensors[name]) for name in shards])
    tensors |= dict(zip(shards, (part.clone() for part in parts), strict=True))
    tensors[shards[0].split("shard_")[0] + "weight_scale"] = stored["weight_scale"]
    save_file(tensors, path)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["bf16", "fp8", "nvfp4"])
def test_the_demo_writes_the_same_text(table: str, tmp_path: Path) -> None:
    write_demo(tmp_path / "checkpoint", table)
    options = {"ple": "nvfp4"} if table == "nvfp4" else {}
    texts = []
    for residency in PleResidency:
        bundle = bundles.build(
            tmp_path / "checkpoint", tmp_path / residency, max_seq_len=256, ple_residency=residency, **options
        )
        texts.append(texts_of(bundle, ["Emma was not", "The house stood"], max_tokens=60))
    assert texts[0] == texts[1] == texts[2]
