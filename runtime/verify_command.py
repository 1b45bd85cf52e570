"""``qwen4exp-verify BUNDLE``: the engine and the program side by side on the GPU that the engine is for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.backend import load_eager_backend
from qwen4exp_trt.runtime.bundle_programs import load_programs
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.cuda_device import device_from_name
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.progress_line import loading_line
from qwen4exp_trt.runtime.side_by_side import check_difference, compare, make_steps
from qwen4exp_trt.runtime.state_pool import allocate_states, state_bytes
from qwen4exp_trt.runtime.streams import CudaStream, Stream
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend
from qwen4exp_trt.runtime.tensorrt.engine_checks import check_engine_fits
from qwen4exp_trt.runtime.tensorrt.module import load_trt

PROG = "qwen4exp-verify"
TOLERANCE = 0.05
"""Relative RMS. Both round to BF16 after every op, but TensorRT's own layers sum in another order."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog=PROG,
        description="Run a bundle's engine and its program on the same random steps and compare all states and logits.",
    )
    add = parser.add_argument
    add("bundle", type=Path, help="folder made by qwen4exp-build")
    add("--device", default="cuda", help="where both execute (default: %(default)s)")
    text = "where the checkpoint is now (default: where it was at the build)"
    add("--checkpoint", type=Path, metavar="FOLDER", help=text)
    add("--tolerance", type=float, default=TOLERANCE, metavar="X", help="relative RMS error (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the token ids (default: %(default)s)")
    return parser.parse_args(argv)


def verify(
    args: argparse.Namespace,
    trt: ModuleType | None = None,
    make_stream: Callable[[torch.device], Stream] = CudaStream,
) -> None:
    """Print the largest error of each step; `BundleError` names the first tensor that differs too much."""
    manifest = Manifest.load(args.bundle)
    manifest.check_files(args.bundle)
    device = device_from_name(args.device)
    if manifest.backend is None:
        raise BundleError(f"{args.bundle}: has no engine to verify; build it with --activation-dtype bfloat16")
    trt = trt or load_trt(manifest.backend)
    check_engine_fits(trt, args.bundle, manifest, device)
    limits = manifest.limits
    steps = make_steps(limits, manifest.vocab_size, manifest.config["indexer_budget"] or 0, args.seed)
    longest = max(rows.context_len + len(rows.token_ids) for step in steps for rows in step.rows)
    blocks = -(-longest // limits.block_size)
    num_blocks = blocks * min(2, limits.max_batch_size)
    programs = load_programs(args.bundle, manifest, manifest.draft is not None)
    specs = tuple(spec for program in programs for spec in program.states)
    options = LoadOptions(
        checkpoint=args.checkpoint,
        num_blocks=num_blocks,
        with_draft_head=manifest.draft is not None,
        other_uses={"states of the engine": state_bytes(specs, num_blocks, limits.num_slots)},
        progress=loading_line().show,
    )
    program = load_eager_backend(args.bundle, manifest, options, device, runs_engine=True)
    states, head, draft = allocate_states(specs, num_blocks, limits.num_slots, device), program.draft, None
    bundle = trt, args.bundle, manifest
    if head is not None:
        parts = head.program, states, head.weights, device
        draft = TensorRTBackend(*bundle, *parts, is_draft=True, stream=make_stream(device), jit_cache=options.jit_cache)
    parts = program.program, states, program.weights, device
    engine = TensorRTBackend(*bundle, *parts, draft=draft, stream=make_stream(device), jit_cache=options.jit_cache)
    results = compare(steps, blocks, program, engine, program.rows)
    for step, differences in zip(steps, results, strict=True):
        worst = check_difference(differences, args.tolerance)
        print(f"{step.name:42} largest error {worst:.2e} of {len(differences)} tensors")
    both = (
        "the engine agrees with the program"
        if draft is None
        else "the engines of the model and its draft head agree with theirs"
    )
    print(f"{both} within {args.tolerance:g} on {len(steps)} steps")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr if they differ or cannot be run."""
    args = parse_args(argv)
    return run_command(PROG, lambda: verify(args))


if __name__ == "__main__":
    sys.exit(main())
