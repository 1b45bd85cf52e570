"""The released config, its export at full size, and the formats in which checkpoints of it are published."""

from __future__ import annotations

import re
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.weight_formats import WeightFormat

RELEASED_CONFIG = Path(__file__).parents[1] / "fixtures" / "released_config.json"
BLOCK_SIZE = 64


@dataclass(frozen=True)
class ReleasedExport:
    """The program, and what the export cost."""

    config: ModelConfig
    program: Program
    seconds: float
    peak_growth_bytes: int
    """How much the largest resident size of the process grew."""


def released_config(has_draft_head: bool = False) -> ModelConfig:
    config = ModelConfig.from_file(RELEASED_CONFIG)
    return config if has_draft_head else config.without_draft_head()


def export_released() -> ReleasedExport:
    config = released_config()
    start, peak = time.perf_counter(), _peak_bytes()
    program = export_program(config, "bfloat16", BLOCK_SIZE)
    return ReleasedExport(config, program, time.perf_counter() - start, _peak_bytes() - peak)


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


EXPERTS = r"^layers.*\.mlp\.experts\."
TABLE = r"\.ngram_embedding\."
NGRAM = r"\.ple\.(key|value)_proj\."
SHARED_EXPERTS = r"^layers.*\.shared_expert\."
LINEAR_ATTENTION = r"\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\."
ATTENTION = r"^layers.*\.self_attn\.[qkvo]_proj\."
INDEXER = r"^layers.*\.index_qk_proj\."
HYPER_CONNECTIONS = r"^(?!mtp).*\.(input_mix_weight_down|input_mix_weight_up|block_inject_weight)\."
LM_HEAD = r"^lm_head\."
DRAFT_EXPERTS = r"^mtp\..*\.experts\."


def released_formats(format_of: dict[str, WeightFormat]) -> dict[str, WeightFormat]:
    """The format of each weight of the released model of which one of the patterns is found in the name."""
    names = expected_weights(released_config(has_draft_head=True))
    return {name: fmt for pattern, fmt in format_of.items() for name in names if re.search(pattern, name)}


OFFICIAL_FP8 = released_formats({EXPERTS: WeightFormat.FP8_BLOCKS, TABLE: WeightFormat.FP8})
PUBLISHED_NVFP4 = released_formats({EXPERTS: WeightFormat.NVFP4, TABLE: WeightFormat.FP8})
NVFP4_TABLE = released_formats({TABLE: WeightFormat.NVFP4})
CONVERTED_TO_NVFP4 = PUBLISHED_NVFP4 | released_formats(
    dict.fromkeys((SHARED_EXPERTS, LINEAR_ATTENTION, ATTENTION, LM_HEAD), WeightFormat.NVFP4)
)
"""What ``--precision nvfp4`` makes of a published NVFP4 checkpoint."""
