"""Builds the engine of a config.json, without weights, and holds time, memory and size against their bars.

    python benchmarks/build_full_size.py tests/fixtures/released_config.json

Prints a table, appends a line to ``benchmarks/results/build_full_size.jsonl``, and exits with 1 when a bar is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from results_file import append_result

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.calibrate import linears_of_layers
from qwen4exp_trt.builder.compile import compile_program, transform_config
from qwen4exp_trt.builder.engine import build_engine
from qwen4exp_trt.builder.options import W4A4, BuildOptions
from qwen4exp_trt.builder.policy import PRECISIONS
from qwen4exp_trt.builder.profiles import optimization_profiles
from qwen4exp_trt.builder.reporter import Reporter
from qwen4exp_trt.builder.weight_plan import plan_weights
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, LAYERS_FILE, ONNX_FILE
from qwen4exp_trt.runtime.tensorrt.module import load_trt

BARS = {"total_s": 90.0, "peak_rss_mib": 3 * 1024.0, "engine_mib": 128.0}
"""Upper bounds on a machine with two cores."""
W4A4_BARS = {"total_s": 150.0, "engine_mib": 192.0}
"""With FP4 GEMMs, each of which brings its kernels; the program is traced twice, once to calibrate."""
PLACEHOLDER_SCALE = 0.01
"""Of activations: calibration would need weights, and the value changes nothing that is measured."""


class StageTimes(Reporter):
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._begin = "", time.perf_counter()

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] = now - self._begin
        self._stage, self._begin = name, now


def measure(config: Path, target: str, precision: str) -> dict[str, float]:
    """Build with default limits; times in seconds, sizes in MiB. The peak counts the whole process.

    The total has the draft head's engine in it.
    """
    times = StageTimes()
    build = build_w4a4 if precision == W4A4 else build_from_config
    built = build(config, target, precision, times)
    times.stage("")
    layers, draft = built.layers, built.draft_layers
    return {
        **{f"{stage}_s": seconds for stage, seconds in times.seconds.items()},
        "total_s": sum(times.seconds.values()),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "engine_mib": built.engine_bytes / 2**20,
        "onnx_mib": built.onnx_bytes / 2**20,
        "layers": len(layers["layers"]),
        **{f"{name}_activation_mib": size / 2**20 for name, size in layers["activation_bytes"].items()},
        "draft_engine_mib": built.draft_engine_bytes / 2**20,
        "draft_layers": len(draft["layers"]),
        **{f"draft_{name}_activation_mib": size / 2**20 for name, size in draft["activation_bytes"].items()},
    }


@dataclass(frozen=True)
class Built:
    """The sizes of files, and what layers.json has: of the model, and of its draft head."""

    engine_bytes: int
    onnx_bytes: int
    layers: dict[str, Any]
    draft_engine_bytes: int
    draft_layers: dict[str, Any]


def build_from_config(config: Path, target: str, precision: str, times: StageTimes) -> Built:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # kernels are compiled, whatever was built here before
        output = Path(folder) / "bundle"
        options = BuildOptions(checkpoint=config, output=output, target=target, precision=precision, config_only=True)
        files = build_bundle(options, times).manifest.files
        layers, draft_layers = (
            json.loads((part / LAYERS_FILE).read_text(encoding="utf-8")) for part in (output, output / DRAFT_DIR)
        )
    sizes = files[ENGINE_FILE].size, files[ONNX_FILE].size
    return Built(*sizes, layers, files[f"{DRAFT_DIR}/{ENGINE_FILE}"].size, draft_layers)


def build_w4a4(config_file: Path, target: str, precision: str, times: StageTimes) -> Built:
    times.stage("config")
    config, options = ModelConfig.from_file(config_file), BuildOptions(checkpoint=config_file, output=Path("unused"))
    plan = plan_weights(config, None, precision, "checkpoint", ())
    quantization = Quantization(plan.formats, plan.table_scales)
    times.stage("find projections")
    program, _ = transform_config(config, options.export, quantization)
    input_scales = dict.fromkeys(linears_of_layers(program), PLACEHOLDER_SCALE)
    compiled = compile_program(config, options.export, replace(quantization, input_scales=input_scales), times.stage)
    draft = compile_program(config, replace(options.export, is_draft=True), quantization, times.stage)
    engines = []
    for name, part in (("engine", compiled), ("draft head engine", draft)):
        times.stage(name)
        profiles = optimization_profiles(options.limits_for(config), (*part.program.inputs, *part.program.states))
        engines.append(build_engine(load_trt(options.backend), part.onnx_model, profiles, target))
    of_model, of_draft = engines
    sizes = len(of_model.engine), compiled.onnx_model.ByteSize()
    return Built(*sizes, of_model.layers, len(of_draft.engine), of_draft.layers)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the build of an engine from a config.json alone.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--target", default="sm121")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    args = parser.parse_args()
    results = measure(args.config, args.target, args.precision)
    bars = BARS | (W4A4_BARS if args.precision == W4A4 else {})
    for name, value in results.items():
        bar = f"  (at most {bars[name]:g})" if name in bars else ""
        print(f"{name:<24}{value:12.2f}{bar}")
    rounded = {name: round(value, 2) for name, value in results.items()}
    described = {"config": args.config.name, "target": args.target, "precision": args.precision}
    append_result("build_full_size", described | rounded)
    exceeded = [name for name, bar in bars.items() if results[name] > bar]
    if exceeded:
        print(f"above the bar: {', '.join(exceeded)}", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
