"""Builds the engine of a config.json, without weights, and holds time, memory and size against their bars.

    python benchmarks/build_full_size.py tests/fixtures/released_config.json

Prints a table, appends a line to ``benchmarks/results/build_full_size.jsonl``, and exits with 1 when a bar is exceeded.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from results_file import append_result

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.builder.policy import PRECISIONS
from qwen4exp_trt.builder.reporter import Reporter
from qwen4exp_trt.runtime.manifest import ENGINE_FILE, LAYERS_FILE, ONNX_FILE

BARS = {"total_s": 90.0, "peak_rss_mib": 3 * 1024.0, "engine_mib": 128.0}
"""Upper bounds on a machine with two cores."""


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
    """Build a bundle with default limits; times in seconds, sizes in MiB. The peak counts the whole process."""
    times = StageTimes()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bundle"
        options = BuildOptions(checkpoint=config, output=output, target=target, precision=precision, config_only=True)
        files = build_bundle(options, times).manifest.files
        times.stage("")
        layers = json.loads((options.output / LAYERS_FILE).read_text(encoding="utf-8"))
    return {
        **{f"{stage}_s": seconds for stage, seconds in times.seconds.items()},
        "total_s": sum(times.seconds.values()),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "engine_mib": files[ENGINE_FILE].size / 2**20,
        "onnx_mib": files[ONNX_FILE].size / 2**20,
        "layers": len(layers["layers"]),
        **{f"{name}_activation_mib": size / 2**20 for name, size in layers["activation_bytes"].items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the build of an engine from a config.json alone.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--target", default="sm121")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    args = parser.parse_args()
    results = measure(args.config, args.target, args.precision)
    for name, value in results.items():
        bar = f"  (at most {BARS[name]:g})" if name in BARS else ""
        print(f"{name:<24}{value:12.2f}{bar}")
    rounded = {name: round(value, 2) for name, value in results.items()}
    described = {"config": args.config.name, "target": args.target, "precision": args.precision}
    append_result("build_full_size", described | rounded)
    exceeded = [name for name, bar in BARS.items() if results[name] > bar]
    if exceeded:
        print(f"above the bar: {', '.join(exceeded)}", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
