"""Imports the peers' kernels from a folder that is not part of this project.

The folder holds the package ``fla`` of flash-linear-attention as it is, and of vLLM the files of
``vllm/models/qwen4_exp/nvidia/ops``. The latter import a little of vLLM, of which stand-ins are made here: the facts
about the GPU, Triton itself, and no warm-up.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_OPS = Path("vllm") / "models" / "qwen4_exp" / "nvidia" / "ops"


def use_flash_linear_attention(folder: Path) -> Any:
    """The module ``fla.ops.gated_delta_rule``."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module("fla.ops.gated_delta_rule")


def use_vllm_ops(folder: Path, name: str) -> Any:
    """The module ``name`` (``hc``, ``qsa``, ``qsa_indexer``) of vLLM's ops for this model."""
    _make_stand_ins()
    spec = importlib.util.spec_from_file_location(f"vllm_ops_{name}", folder / _OPS / f"{name}.py")
    assert spec is not None and spec.loader is not None, folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _make_stand_ins() -> None:
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    capability = torch.cuda.get_device_capability()
    platform = SimpleNamespace(
        get_device_capability=lambda: capability,
        has_device_capability=lambda wanted: 10 * capability[0] + capability[1] >= wanted,
        is_device_capability_family=lambda family: 10 * capability[0] == family,
        is_arch_support_pdl=lambda: capability[0] >= 9,
    )
    helper = "vllm.model_executor.warmup.jit_warmup_triton_helper"
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": 512},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl, "HAS_TRITON": True},
        "vllm.utils": {},
        "vllm.utils.math_utils": {"round_up": lambda x, step: -(-x // step) * step},
        "vllm.model_executor": {},
        "vllm.model_executor.warmup": {},
        helper: {"TritonWarmupTensor": None, "triton_scalar_specialization_rep": None},
    }
    for name, members in stand_ins.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(members)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
