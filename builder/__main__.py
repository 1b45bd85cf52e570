"""``qwen4exp-build CHECKPOINT -o BUNDLE``: makes a bundle from a checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from qwen4exp_trt.builder.build import BuildReport, build_bundle, plan_bundle
from qwen4exp_trt.builder.options import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_PREFILL_CHUNK,
    DEFAULT_TARGET,
    PRECISIONS,
    BuildOptions,
    PlanOptions,
)
from qwen4exp_trt.builder.plan import Plan
from qwen4exp_trt.builder.plan_report import describe_misfit, describe_total, format_plan
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.manifest import ENGINE_FILE, Manifest
from qwen4exp_trt.runtime.trt_module import MODULE_OF_BACKEND

PROG = "qwen4exp-build"

_NAME_WIDTH = 20


def parse_args(argv: Sequence[str] | None) -> BuildOptions | PlanOptions:
    """`BuildOptions`, or with ``--plan`` only the `PlanOptions` among the arguments."""
    parser = OneLineParser(prog=PROG, description="Lower a qwen4_exp checkpoint to a bundle with a TensorRT engine.")
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder with config.json and *.safetensors")
    add("-o", "--output", type=Path, metavar="BUNDLE", help="folder to write; a bundle is replaced")
    add("--target", metavar="SM", help=f"GPU architecture of the engine (default: {DEFAULT_TARGET}, GB10)")
    add(
        "--precision",
        choices=PRECISIONS,
        default="bfloat16",
        help="of weights and activations; float32 has no engine, for verification (default: %(default)s)",
    )
    add(
        "--backend",
        choices=tuple(MODULE_OF_BACKEND),
        default="tensorrt-rtx",
        help="which TensorRT builds the engine (default: %(default)s)",
    )
    add("--max-batch-size", type=int, default=8, metavar="N", help="sequences in one step (default: %(default)s)")
    add("--max-seq-len", type=int, metavar="N", help="tokens of one sequence (default: the model's limit)")
    add(
        "--prefill-chunk",
        type=int,
        default=DEFAULT_PREFILL_CHUNK,
        metavar="N",
        help="new tokens in one step (default: %(default)s, or --max-seq-len if that is less)",
    )
    add(
        "--block-size",
        type=int,
        default=DEFAULT_BLOCK_SIZE,
        metavar="N",
        help="tokens of a KV cache page (default: %(default)s)",
    )
    add("--verify", action="store_true", help="execute every pass and the ONNX on the CPU and compare (default: no)")
    add(
        "--config-only",
        action="store_true",
        help="build from a config.json (or the folder with it), without weights (default: no)",
    )
    add(
        "--plan", action="store_true", help="print what it will need and exit with 2 if that does not fit (default: no)"
    )
    values: dict[str, Any] = vars(parser.parse_args(argv))
    if values.pop("plan"):
        # The config is all that a plan reads.
        values["config_only"] = True
        return PlanOptions(**{field.name: values[field.name] for field in fields(PlanOptions)})
    if values["output"] is None:
        parser.error("the following arguments are required: -o/--output")
    return BuildOptions(**values)


class _Progress:
    """Prints each stage with the seconds that it took."""

    def __init__(self) -> None:
        self.begin = self._last = time.monotonic()
        self._is_open = False

    def __call__(self, stage: str) -> None:
        self.finish()
        print(f"{stage:<{_NAME_WIDTH}}  ", end="", flush=True)
        self._is_open = True

    def finish(self, is_ok: bool = True) -> None:
        """End the line of the last stage."""
        now = time.monotonic()
        if self._is_open:
            print(f"{now - self._last:.1f} s" if is_ok else "failed", flush=True)
        self._last, self._is_open = now, False


def format_report(report: BuildReport, output: Path, seconds: float) -> str:
    """The table that ends a build."""
    manifest, program, limits = report.manifest, report.program, report.manifest.limits
    per_seq = sum(spec.row_bytes * (limits.blocks_per_seq if spec.is_paged else 1) for spec in program.states)
    weights = sum(spec.tensor.num_bytes({}) for spec in program.weights)
    rows = {
        "bundle": str(output),
        "engine": _describe_engine(manifest),
        "precision": manifest.precision,
        "weights": f"{weights / 2**20:,.1f} MiB in {len(program.weights)} tensors{_describe_source(report)}",
        "states": f"{per_seq / 2**20:,.1f} MiB for a sequence of {limits.max_seq_len} tokens",
        "memory": describe_total(report.plan),
        "step": f"at most {limits.max_batch_size} sequences, {limits.max_step_tokens} tokens",
        "passes": ", ".join(f"{result['name']} {result['rewrites']}" for result in manifest.passes),
    }
    if report.onnx_errors:
        passes = max(result["max_error"] for result in manifest.passes)
        onnx = ", ".join(f"{error:.1e} ({precision})" for precision, error in report.onnx_errors.items())
        rows["verified"] = f"relative error of the passes {passes:.1e}, of the ONNX {onnx}"
    rows["time"] = f"{seconds:.1f} s"
    return "\n".join(f"{name:<{_NAME_WIDTH}}  {value}" for name, value in rows.items())


def _describe_engine(manifest: Manifest) -> str:
    engine = manifest.files.get(ENGINE_FILE)
    if engine is None:
        return "none, a float32 bundle is for the eager backend"
    return f"{engine.size / 2**20:.2f} MiB for {manifest.target}, by {manifest.backend}"


def _describe_source(report: BuildReport) -> str:
    if report.manifest.checkpoint is None:
        return " (not read: --config-only)"
    parts = [f"{count} {kind}" for kind, count in report.set_aside.items() if count]
    return f" (set aside: {', '.join(parts)})" if parts else ""


def plan(options: PlanOptions) -> None:
    """Print the plan; `BuildError` if the target has too little memory for it."""
    options.check()
    made = plan_bundle(options, options.read_config())
    print(format_plan(made))
    if (misfit := describe_misfit(made)) is not None:
        raise BuildError(misfit)


def build(options: BuildOptions) -> None:
    """Build the bundle, printing the plan, progress and the final table."""
    progress = _Progress()

    def show_plan(made: Plan) -> None:
        progress.finish()
        print(f"\n{format_plan(made)}\n", flush=True)
        if (misfit := describe_misfit(made)) is not None:
            print(f"{PROG}: warning: {misfit}", file=sys.stderr)

    try:
        report = build_bundle(options, progress, show_plan)
    except BaseException:
        progress.finish(is_ok=False)
        raise
    progress.finish()
    print()
    print(format_report(report, options.output, time.monotonic() - progress.begin))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr for a user's mistake."""
    options = parse_args(argv)
    return run_command(PROG, lambda: build(options) if isinstance(options, BuildOptions) else plan(options))


if __name__ == "__main__":
    sys.exit(main())
