"""A manifest with something in every field."""

from __future__ import annotations

from pathlib import Path

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.calibration import Calibration
from qwen4exp_trt.runtime.file_identity import FileIdentity
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.manifest import CheckpointRef, DraftHead, FileRef, Manifest
from qwen4exp_trt.runtime.specs import TensorSpec


def make_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle, saved with its files in ``folder``."""
    names = ["program/graph.py", "program/tables.json", "decoder.onnx", "decoder.engine", "layers.json"]
    names += [*(f"mtp/{name}" for name in names), "mtp/token_ids.json"]
    (folder / "program").mkdir(parents=True)
    (folder / "mtp" / "program").mkdir(parents=True)
    for name in names:
        (folder / name).write_text(name)
    manifest = Manifest(
        config={"hidden_size": 32},
        precision="nvfp4-w4a4",
        ple_precision="nvfp4",
        ple_residency="host",
        host_weights=["layers.1.ple.ngram_embedding.codes"],
        activation_dtype="bfloat16",
        kv_cache_dtype="float8_e4m3fn",
        weights=[{"component": "lm_head", "stored": "float", "held": "nvfp4", "remark": "converted"}],
        calibration=Calibration({"layers.0.linear_attn.out_proj.nvfp4_linear": 0.25}, "text.txt", "1" * 64, 4096),
        target="sm121",
        backend="tensorrt-rtx",
        kernel_targets=["sm121", "sm90"],
        limits=EngineLimits(2, 64, 32, 16),
        activation_bytes=2**20,
        vocab_size=96,
        stop_token_ids=(3, 5),
        checkpoint=CheckpointRef("/somewhere", {"model.safetensors": FileIdentity(1234, "0" * 64)}),
        converted=CheckpointRef("/beside", {"abc.safetensors": FileIdentity(99, "2" * 64)}),
        plugins={name: spec.version for name, spec in all_specs().items()},
        profiles={"decode": {"input_ids": [[1], [4], [8]]}},
        debug_outputs=(TensorSpec("layers.0.mlp.out_proj.linear", ("T", 32), "bfloat16"),),
        passes=[{"name": "drop_dead_code", "rewrites": 3, "max_error": None}],
        draft=DraftHead(
            vocab_size=48,
            has_token_ids=True,
            profiles={"decode": {"stack": [[1, 8]]}},
            debug_outputs=(TensorSpec("mtp.fc_hidden.linear", ("L", 32), "bfloat16"),),
            passes=[],
        ),
        tools={"torch": "2.11"},
        files={name: FileRef.of(folder / name) for name in names},
    )
    manifest.save(folder)
    return manifest
