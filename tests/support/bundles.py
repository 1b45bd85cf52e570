"""Tiny checkpoints with tokenizer files, and bundles of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from model_zoo import tiny_config_dict, write_hf_checkpoint
from tiny_tokenizer import tiny_backend

from qwen4exp_trt.builder import build as build_module
from qwen4exp_trt.builder import compile as compile_module
from qwen4exp_trt.builder import planning
from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.engine import EngineBuild
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.frontend.export import export_draft_program, export_program

ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = ROOT / "tests" / "fixtures" / "chat_template.jinja"
DEMO_CHECKPOINT = ROOT / "demo" / "checkpoint"
HELDOUT_TEXT = ROOT / "demo" / "heldout.txt"

VOCAB_SIZE = 384
"""More than the tokenizer has: the last rows of the head have no token."""
ENDOFTEXT, IM_END = 0, 2
"""The ids of those special tokens: the eos of the config, and the other one of the generation config."""

GENERATION_CONFIG = {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": [IM_END, ENDOFTEXT]}

LIMITS: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 64, "prefill_chunk": 8, "block_size": 8}


def config_dict(**overrides: Any) -> dict[str, Any]:
    """Two layers with every mechanism."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1]}
    return tiny_config_dict(vocab_size=VOCAB_SIZE, eos_token_id=ENDOFTEXT, **layers, **overrides)


@cache
def tiny_checkpoint(folder: Path, **overrides: Any) -> Path:
    """Write a checkpoint with a tokenizer, a chat template and a generation config; one a session and ``folder``."""
    write_hf_checkpoint(folder, config_dict(**overrides))
    write_text_files(folder)
    return folder


def mtp_checkpoint(base: Path) -> Path:
    """`tiny_checkpoint` with a draft head; one a session and ``base``."""
    return tiny_checkpoint(base / "tiny-mtp-checkpoint", mtp_num_hidden_layers=1)


def write_text_files(folder: Path) -> None:
    tiny_backend().save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    shutil.copyfile(CHAT_TEMPLATE, folder / "chat_template.jinja")


_export_once, _export_draft_once = cache(export_program), cache(export_draft_program)


@contextmanager
def traced_once() -> Iterator[None]:
    """All builds of a config have one trace, most of the time of a tiny build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "export_program", _export_once)
        patch.setattr(compile_module, "export_draft_program", _export_draft_once)
        yield


def build(checkpoint: Path, output: Path, **options: Any) -> Path:
    """Build a bundle with float32 activations (no engine) within `LIMITS`, unless told otherwise.

    The tests that run on simulated engines get a stand-in for the engine with it.
    """
    values = {"activation_dtype": "float32", **LIMITS} | options
    if simulated_engines and values["activation_dtype"] == "float32":
        return build_with_stand_in(checkpoint, output, **values)
    with traced_once():
        build_bundle(BuildOptions(checkpoint=checkpoint, output=output, **values))
    return output


@contextmanager
def quick_builds() -> Iterator[None]:
    """Builds trace a config once and estimate no activations: most of the time of a tiny build."""
    with pytest.MonkeyPatch.context() as patch, traced_once():
        for name in ("estimate_activations", "estimate_workspace"):
            patch.setattr(planning, name, lambda *step: 0)
        yield


simulated_engines = False
"""Whether `simulated_engines.py` runs what the tests load on engines."""


def build_with_stand_in(checkpoint: Path, output: Path, **options: Any) -> Path:
    """A bundle in which a short text stands for each engine: it is built without TensorRT, and may be float32.

    All else is there: the ONNX, which the simulator executes in that dtype, the profiles, and a manifest that the
    runtime checks like any other. It says nothing of what TensorRT makes of the model.
    """
    values = {"activation_dtype": "float32", **LIMITS} | options
    with pytest.MonkeyPatch.context() as patch, traced_once():
        patch.setattr(BuildOptions, "has_engine", True)
        patch.setattr(build_module, "build_engine", _stand_in)
        patch.setattr(build_module, "compile_kernels", lambda *args: {})
        build_bundle(BuildOptions(checkpoint=checkpoint, output=output, **values))
    return output


def _stand_in(trt: Any, model: onnx.ModelProto, profiles: Mapping[str, Any], target: str) -> EngineBuild:
    digest = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    return EngineBuild(f"stands for the engine of {digest}".encode(), {"activation_bytes": dict.fromkeys(profiles, 0)})


@cache
def disk_bundle(folder: Path) -> Path:
    """A float32 bundle of `tiny_checkpoint` whose n-gram table stays on disk; one a session and ``folder``."""
    return build(tiny_checkpoint(folder / "tiny-checkpoint"), folder / "tiny-disk", ple_residency="disk")


def build_for_gpu(output: Path, activation_dtype: str, **more: Any) -> Path:
    """The demo with kernels for the GPU at hand. Its engines, which need TensorRT and are not run, are stand-ins."""
    own = "sm{}{}".format(*torch.cuda.get_device_capability())
    options = {"kernel_target": (own,)} if activation_dtype == "float32" else {"target": own}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "_load_trt", lambda options: torch if options.has_engine else None)
        patch.setattr(build_module, "build_engine", lambda *args: EngineBuild(b"engine", {"activation_bytes": {}}))
        return build(DEMO_CHECKPOINT, output, activation_dtype=activation_dtype, **more, **options)
