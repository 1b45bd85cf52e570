"""Tiny checkpoints with tokenizer files, and bundles of them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import tiny_config_dict, write_hf_checkpoint
from tiny_tokenizer import tiny_backend

from qwen4exp_trt.builder import build as build_module
from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.engine import EngineBuild
from qwen4exp_trt.builder.options import BuildOptions

ROOT = Path(__file__).parents[1]
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


def write_text_files(folder: Path) -> None:
    tiny_backend().save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    shutil.copyfile(CHAT_TEMPLATE, folder / "chat_template.jinja")


def build(checkpoint: Path, output: Path, **options: Any) -> Path:
    """Build a bundle with float32 activations (no engine) within `LIMITS`, unless told otherwise."""
    values = {"activation_dtype": "float32", **LIMITS} | options
    build_bundle(BuildOptions(checkpoint=checkpoint, output=output, **values))
    return output


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
