"""``qwen4exp-build CHECKPOINT -o BUNDLE``: makes a bundle from a checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from qwen4exp_trt.builder.build import BuildReport, build_bundle
from qwen4exp_trt.builder.options import (
    ACTIVATION_DTYPES,
    CONVERT_DEVICES,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_PREFILL_CHUNK,
    DEFAULT_TARGET,
    DEFAULT_WEIGHTS_DIR,
    DRAFT_HEADS,
    KV_CACHE_DTYPES,
    PLE_RESIDENCIES,
    W4A4,
    BuildOptions,
    PlanOptions,
)
from qwen4exp_trt.builder.plan import Plan
from qwen4exp_trt.builder.plan_report import describe_misfit, describe_total, format_plan, size
from qwen4exp_trt.builder.planning import plan_bundle, read_stored_weights, weight_plan_for
from qwen4exp_trt.builder.policy import PLE_PRECISIONS, PRECISIONS
from qwen4exp_trt.builder.reporter import Reporter
from qwen4exp_trt.builder.weight_table import WeightTableRow, format_weight_table, weight_table
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, KERNELS_DIR, Manifest
from qwen4exp_trt.runtime.progress_line import ProgressLine
from qwen4exp_trt.runtime.specs import PleResidency
from qwen4exp_trt.runtime.tensorrt.module import MODULE_OF_BACKEND

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
        "--backend",
        choices=tuple(MODULE_OF_BACKEND),
        default="tensorrt-rtx",
        help="which TensorRT builds the engine (default: %(default)s)",
    )
    add(
        "--kernel-target",
        action="append",
        default=[],
        metavar="SM",
        help="compile the CUDA kernels for this GPU architecture too, such as sm90; may be repeated (default: no)",
    )
    _add_weight_options(add)
    _add_draft_options(add)
    _add_limit_options(add)
    add(
        "--mark-plugin-inputs",
        nargs="*",
        metavar="PATTERN",
        help="make outputs of what plugins read, all of them or those whose names match, such as 'layers.0.*', for "
        "qwen4exp-verify to look at (default: no)",
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
    for name in ("keep", "kernel_target"):
        values[name] = tuple(values[name])
    marked = values["mark_plugin_inputs"]
    values["mark_plugin_inputs"] = () if marked is None else tuple(marked) or ("*",)
    if values.pop("plan"):
        values["config_only"] |= values["checkpoint"].is_file()
        return PlanOptions(**{field.name: values[field.name] for field in fields(PlanOptions)})
    if values["output"] is None:
        parser.error("the following arguments are required: -o/--output")
    return BuildOptions(**values)


def _add_weight_options(add: Callable[..., Any]) -> None:
    add(
        "--precision",
        choices=PRECISIONS,
        default="checkpoint",
        help="of the weights: as the checkpoint has them, NVFP4 with 16-bit or (w4a4) NVFP4 activations, or nothing "
        "quantized (default: %(default)s)",
    )
    add(
        "--ple",
        choices=PLE_PRECISIONS,
        help="the same for the n-gram table (default: bf16 with --precision bf16, else checkpoint)",
    )
    add(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="weights that stay as the checkpoint has them, such as 'layers.0.*' or 'lm_head.*'; may be repeated",
    )
    add(
        "--ple-residency",
        choices=PLE_RESIDENCIES,
        default=PleResidency.DEVICE.value,
        help="where the n-gram table is at run time: in the memory of the GPU or of the host, or in its files, of "
        "which the rows of each step are read (default: %(default)s)",
    )
    add("--calibration", type=Path, metavar="TEXT", help=f"text file that --precision {W4A4} needs to find its scales")
    add(
        "--activation-dtype",
        choices=ACTIVATION_DTYPES,
        default="bfloat16",
        help="float32 has no engine, for verification (default: %(default)s)",
    )
    add(
        "--kv-cache-dtype",
        choices=tuple(KV_CACHE_DTYPES),
        default="auto",
        help="auto is the activation dtype (default: %(default)s)",
    )
    add(
        "--convert-device",
        choices=CONVERT_DEVICES,
        default="cpu",
        help="where weights are converted, with the same result (default: %(default)s)",
    )
    add(
        "--weights-dir",
        type=Path,
        metavar="FOLDER",
        help=f"where converted weights are kept and found again (default: {DEFAULT_WEIGHTS_DIR}, beside the bundle)",
    )


def _add_draft_options(add: Callable[..., Any]) -> None:
    add(
        "--draft-head",
        choices=DRAFT_HEADS,
        default="checkpoint",
        help="whether the checkpoint's draft head (mtp.*) is built in, if it has one (default: %(default)s)",
    )
    add(
        "--draft-vocab-size",
        type=int,
        metavar="N",
        help="let the draft head propose N ids only, with a smaller lm_head of its own (default: all ids)",
    )
    add(
        "--draft-vocab",
        type=Path,
        metavar="TEXT",
        help="text file whose most frequent ids these are (default: those that the tokenizer learned first)",
    )


def _add_limit_options(add: Callable[..., Any]) -> None:
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


class _Printer(Reporter):
    """Prints each stage with the seconds that it took, and what is told between them."""

    def __init__(self) -> None:
        self.begin = self._last = time.monotonic()
        self._title: str | None = None
        """The beginning of the line of the stage that runs."""
        self._line: ProgressLine | None = None

    def stage(self, name: str) -> None:
        self.finish()
        self._title = f"{name:<{_NAME_WIDTH}}  "
        print(self._title, end="", flush=True)

    def finish(self, is_ok: bool = True) -> None:
        """End the line of the last stage."""
        now = time.monotonic()
        if self._title is not None:
            # A terminal shows progress in the place of the title.
            is_covered = self._line is not None and self._line.is_shown and sys.stdout.isatty()
            title = f"\r\033[K{self._title}" if is_covered else ""
            print(title + (f"{now - self._last:.1f} s" if is_ok else "failed"), flush=True)
        self._last, self._title, self._line = now, None, None

    def show_plan(self, plan: Plan, weights: list[WeightTableRow]) -> None:
        self.finish()
        print(f"\n{format_plan(plan)}\n\n{format_weight_table(weights)}\n", flush=True)
        if (misfit := describe_misfit(plan)) is not None:
            print(f"{PROG}: warning: {misfit}", file=sys.stderr)

    def show_conversion(self, folder: str, num_files: int, num_there: int, num_bytes: int, free_bytes: int) -> None:
        self.finish()
        room = f", {size(num_bytes)} to write, {size(free_bytes)} free" if num_there < num_files else ""
        print(
            f"{'converted weights':<{_NAME_WIDTH}}  {num_there} of {num_files} files are in {folder}{room}", flush=True
        )

    def progress(self, done: int, total: int) -> None:
        if self._line is None:
            self._line = ProgressLine(lambda done, total: f"{done / total:.0%}", quiet_seconds=2.0)
        self._line.show(done, total)


def format_report(report: BuildReport, output: Path, seconds: float) -> str:
    """The table that ends a build."""
    manifest, program, limits = report.manifest, report.program, report.manifest.limits
    programs = [program] if report.draft is None else [program, report.draft.program]
    states = [spec for each in programs for spec in each.states]
    per_seq = sum(spec.row_bytes * (limits.blocks_per_seq if spec.is_paged else 1) for spec in states)
    specs = {spec.name: spec for each in programs for spec in each.weights}
    weights = sum(spec.tensor.num_bytes({}) for spec in specs.values())
    rows = {
        "bundle": str(output),
        "engine": _describe_engine(manifest),
        "draft head": _describe_draft_head(report),
        "kernels": _describe_kernels(manifest),
        "precision": _describe_precision(manifest),
        "weights": f"{weights / 2**20:,.1f} MiB in {len(specs)} tensors{_describe_source(report)}",
        **_describe_debug_outputs(report.plan),
        "states": f"{per_seq / 2**20:,.1f} MiB for a sequence of {limits.max_seq_len} tokens",
        "memory": describe_total(report.plan),
        "step": f"at most {limits.max_batch_size} sequences, {limits.max_step_tokens} tokens",
        "passes": ", ".join(f"{result['name']} {result['rewrites']}" for result in manifest.passes),
    }
    if report.onnx_errors:
        passes = max(result["max_error"] for result in manifest.passes)
        onnx = _describe_errors(report.onnx_errors)
        rows["verified"] = f"relative error of the passes {passes:.1e}, of the ONNX {onnx}"
        if manifest.draft is not None and report.draft is not None:
            passes = max(result["max_error"] for result in manifest.draft.passes)
            onnx = _describe_errors(report.draft.onnx_errors)
            rows["draft head"] += f"; verified: passes {passes:.1e}, ONNX {onnx}"
    rows["time"] = f"{seconds:.1f} s"
    return "\n".join(f"{name:<{_NAME_WIDTH}}  {value}" for name, value in rows.items())


def _describe_engine(manifest: Manifest) -> str:
    engine = manifest.files.get(ENGINE_FILE)
    if engine is None:
        return "none, a float32 bundle is for the eager backend"
    return f"{engine.size / 2**20:.2f} MiB for {manifest.target}, by {manifest.backend}"


def _describe_debug_outputs(plan: Plan) -> dict[str, str]:
    """The row, if there are some."""
    num_marked = len(plan.request.debug_outputs)
    text = f"{num_marked} plugin inputs are outputs, {size(plan.debug_bytes)} in the largest step"
    return {"debug outputs": text} if num_marked else {}


def _describe_errors(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{error:.1e} ({precision})" for precision, error in errors.items())


def _describe_draft_head(report: BuildReport) -> str:
    manifest = report.manifest
    if manifest.draft is None:
        return f"none: {report.why_no_draft}"
    ids = f"{manifest.draft.vocab_size:,} of {manifest.vocab_size:,} ids" if manifest.draft.has_token_ids else "all ids"
    engine = manifest.files.get(f"{DRAFT_DIR}/{ENGINE_FILE}")
    return f"proposes {ids}" + (f", engine of {engine.size / 2**20:.2f} MiB" if engine else "")


def _describe_kernels(manifest: Manifest) -> str:
    sizes = [ref.size for name, ref in manifest.files.items() if name.startswith(f"{KERNELS_DIR}/")]
    if not manifest.kernel_targets:
        return "none, compiled when they run"
    return f"{len(sizes)} for {', '.join(manifest.kernel_targets)}, {sum(sizes) / 2**20:.2f} MiB"


def _describe_precision(manifest: Manifest) -> str:
    return (
        f"{manifest.precision}, n-gram table {manifest.ple_precision} on {manifest.ple_residency}, "
        f"activations {manifest.activation_dtype}, KV cache {manifest.kv_cache_dtype}"
    )


def _describe_source(report: BuildReport) -> str:
    if report.manifest.checkpoint is None:
        return " (not read: --config-only)"
    parts = [f"{count} {kind}" for kind, count in report.set_aside.items() if count]
    return f" (set aside: {', '.join(parts)})" if parts else ""


def plan(options: PlanOptions) -> None:
    """Print the plan; `BuildError` if the target has too little memory for it."""
    options.check()
    draft, stored = read_stored_weights(options, options.read_config())
    config = draft.config
    weight_plan = weight_plan_for(options, config, stored)
    made = plan_bundle(options, weight_plan)
    weights = weight_table(config, weight_plan.choices, options.activation_dtype)
    print(f"{format_plan(made)}\n\n{format_weight_table(weights)}")
    if (misfit := describe_misfit(made)) is not None:
        raise BuildError(misfit)


def build(options: BuildOptions) -> None:
    """Build the bundle, printing the plan, progress and the final table."""
    printer = _Printer()
    try:
        report = build_bundle(options, printer)
    except BaseException:
        printer.finish(is_ok=False)
        raise
    printer.finish()
    print()
    print(format_report(report, options.output, time.monotonic() - printer.begin))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr for a user's mistake."""
    options = parse_args(argv)
    return run_command(PROG, lambda: build(options) if isinstance(options, BuildOptions) else plan(options))


if __name__ == "__main__":
    sys.exit(main())
