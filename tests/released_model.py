"""The released config, and its export at full size."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.runtime.program import Program

RELEASED_CONFIG = Path(__file__).parent / "fixtures" / "released_config.json"
BLOCK_SIZE = 64


@dataclass(frozen=True)
class ReleasedExport:
    """The program, and what the export cost."""

    config: ModelConfig
    program: Program
    seconds: float
    peak_growth_bytes: int
    """How much the largest resident size of the process grew."""


def released_config() -> ModelConfig:
    return ModelConfig.from_file(RELEASED_CONFIG)


def export_released() -> ReleasedExport:
    config = released_config()
    start, peak = time.perf_counter(), _peak_bytes()
    program = export_program(config, "bfloat16", BLOCK_SIZE)
    return ReleasedExport(config, program, time.perf_counter() - start, _peak_bytes() - peak)


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
