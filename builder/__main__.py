"""``qwen4exp-build CHECKPOINT -o BUNDLE``: makes a bundle from a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from qwen4exp_trt.builder.build import BuildReport, build_bundle
from qwen4exp_trt.builder.options import DEFAULT_BLOCK_SIZE, DEFAULT_PREFILL_CHUNK, PRECISIONS, BuildOptions
from qwen4exp_trt.builder.trt_module import MODULE_OF_BACKEND
from qwen4exp_trt.errors import Q4eError
from qwen4exp_trt.runtime.manifest import ENGINE_FILE


def parse_args(argv: Sequence[str] | None) -> BuildOptions:
    parser = argparse.ArgumentParser(
        prog="qwen4exp-build", description="Lower a qwen4_exp checkpoint to a bundle with a TensorRT engine."
    )
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument("--target", default="sm121", help="GPU architecture of the engine (default: %(default)s, GB10)")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bfloat16",
        help="of weights and activations; float32 has no engine, for verification (default: %(default)s)",
    )
    parser.add_argument("--backend", choices=tuple(MODULE_OF_BACKEND), default="tensorrt-rtx")
    parser.add_argument("--max-batch-size", type=int, default=8, help="sequences in one step (default: %(default)s)")
    parser.add_argument("--max-seq-len", type=int, help="tokens of one sequence (default: the model's limit)")
    parser.add_argument(
        "--prefill-chunk", type=int, default=DEFAULT_PREFILL_CHUNK, help="new tokens in one step (default: %(default)s)"
    )
    parser.add_argument(
        "--block-size", type=int, default=DEFAULT_BLOCK_SIZE, help="tokens of a KV cache page (default: %(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="execute every pass and the ONNX on the CPU and compare")
    parser.add_argument("--config-only", action="store_true", help="build the engine from config.json, without weights")
    return BuildOptions(**vars(parser.parse_args(argv)))


class _Progress:
    """Prints each stage with the seconds that it took."""

    def __init__(self) -> None:
        self.begin = self.last = time.monotonic()
        self.stage: str | None = None

    def __call__(self, stage: str) -> None:
        self.finish()
        print(f"{stage} ...", end="", flush=True)
        self.stage = stage

    def finish(self) -> None:
        now = time.monotonic()
        if self.stage is not None:
            print(f" {now - self.last:.1f} s", flush=True)
        self.last, self.stage = now, None


def format_report(report: BuildReport, output: Path, seconds: float) -> str:
    """The table that ends a build."""
    manifest, program = report.manifest, report.program
    limits = manifest.limits
    per_seq = sum(spec.row_bytes * (limits.blocks_per_seq if spec.is_paged else 1) for spec in program.states)
    weights = sum(spec.tensor.num_bytes({}) for spec in program.weights)
    engine = manifest.files.get(ENGINE_FILE)
    rows = [
        ("bundle", str(output)),
        ("engine", f"{engine.size / 2**20:.2f} MiB, {manifest.target}, {manifest.backend}" if engine else "none"),
        ("precision", manifest.precision),
        ("weights", f"{len(program.weights)} tensors, {weights / 2**20:,.1f} MiB" + _set_aside(report.set_aside)),
        ("states", f"{per_seq / 2**20:,.1f} MiB for a sequence of {limits.max_seq_len} tokens"),
        (
            "step",
            f"{limits.max_batch_size} sequences, {limits.prefill_chunk} prefill tokens, pages of {limits.block_size}",
        ),
        ("passes", ", ".join(f"{result['name']} {result['rewrites']}" for result in manifest.passes)),
        ("time", f"{seconds:.1f} s"),
    ]
    return "\n".join(f"{name:>10}  {value}" for name, value in rows)


def _set_aside(counts: dict[str, int]) -> str:
    parts = [f"{count} {kind}" for kind, count in counts.items() if count]
    return f" (set aside: {', '.join(parts)})" if parts else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr for a user's mistake."""
    options, progress = parse_args(argv), _Progress()
    try:
        report = build_bundle(options, progress)
    except Q4eError as error:
        print(f"{' failed' if progress.stage else ''}\n" if progress.stage else "", end="", flush=True)
        print(f"qwen4exp-build: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nqwen4exp-build: interrupted; no bundle was written", file=sys.stderr)
        return 130
    progress.finish()
    print(format_report(report, options.output, time.monotonic() - progress.begin))
    return 0


if __name__ == "__main__":
    sys.exit(main())
