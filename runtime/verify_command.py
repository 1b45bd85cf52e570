"""``qwen4exp-verify BUNDLE``: the engine and the program side by side on the GPU that the engine is for."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.backend import EagerBackend, load_eager_backend
from qwen4exp_trt.runtime.bundle_programs import load_programs
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.cuda_device import device_from_name
from qwen4exp_trt.runtime.layer_report import check_layers, layer_table, step_line, when_all_agree, why_different
from qwen4exp_trt.runtime.layer_watch import LayerWatch
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
    add(
        "--tolerance", type=_tolerance, default=TOLERANCE, metavar="X", help="relative RMS error (default: %(default)s)"
    )
    text = "print every value that the engine shows between its layers (default: no); for a bundle that was built with "
    add("--layers", action="store_true", help=f"{text}--mark-plugin-inputs")
    add("--seed", type=_seed, default=0, metavar="N", help="of the token ids (default: %(default)s)")
    return parser.parse_args(argv)


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no tolerance; give 0 or more")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is no seed; give 0 or more, below 2**63")
    return value


def verify(
    args: argparse.Namespace,
    trt: ModuleType | None = None,
    make_stream: Callable[[torch.device], Stream] = CudaStream,
) -> None:
    """Print the largest errors of each step; `BundleError` names the first tensor that differs too much."""
    manifest = Manifest.load(args.bundle)
    manifest.check_files(args.bundle)
    if manifest.backend is None:
        raise BundleError(f"{args.bundle}: has no engine to verify; build it with --activation-dtype bfloat16")
    if args.layers and not manifest.all_debug_outputs:
        raise BundleError(f"{args.bundle}: its engine shows no values for --layers; build it with --mark-plugin-inputs")
    device = device_from_name(args.device, for_engine=trt is None)
    trt = trt or load_trt(manifest.backend)
    check_engine_fits(trt, args.bundle, manifest, device)
    limits = manifest.limits
    steps = make_steps(limits, manifest.vocab_size, manifest.config["indexer_budget"] or 0, args.seed)
    longest = max(rows.context_len + len(rows.token_ids) for step in steps for rows in step.rows)
    blocks = -(-longest // limits.block_size)
    how = trt, device, make_stream, blocks * min(2, limits.max_batch_size)
    program, engine, watches = _load(args, manifest, *how)
    results = compare(steps, blocks, program, engine, program.rows, watches)
    for step, differences in zip(steps, results, strict=True):
        checks = [check for watch in watches for check in watch.checks]
        print(step_line(step.name, differences, checks))
        if args.layers:
            print(*layer_table(watches), sep="\n")
        for watch in watches:
            check_layers(step.name, watch)
        check_difference(differences, args.tolerance, why_different(checks))
    both = (
        "the engine agrees with the program"
        if engine.draft is None
        else "the engines of the model and its draft head agree with theirs"
    )
    print(f"{both} within {args.tolerance:g} on {len(steps)} steps")
    if watches:
        print(when_all_agree(manifest.all_debug_outputs))


def _load(
    args: argparse.Namespace,
    manifest: Manifest,
    trt: ModuleType,
    device: torch.device,
    make_stream: Callable[[torch.device], Stream],
    num_blocks: int,
) -> tuple[EagerBackend, TensorRTBackend, list[LayerWatch]]:
    """The bundle's program and its engine, each with states of its own, and what looks between their layers."""
    limits, has_head = manifest.limits, manifest.draft is not None
    programs = load_programs(args.bundle, manifest, has_head)
    specs = tuple(spec for program in programs for spec in program.states)
    num_bytes = state_bytes(specs, num_blocks, limits.num_slots)
    options = LoadOptions(
        checkpoint=args.checkpoint,
        num_blocks=num_blocks,
        with_draft_head=has_head,
        other_uses={
            "states of the engine": num_bytes,
            "activations of the program": manifest.activation_bytes,
            "states for the engine's values": num_bytes if manifest.all_debug_outputs else 0,
        },
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
    watches = []
    if manifest.all_debug_outputs:
        watched = allocate_states(specs, num_blocks, limits.num_slots, device)
        watches.append(LayerWatch(program, manifest.debug_outputs, watched, args.tolerance))
        if head is not None and manifest.draft is not None:
            marked = manifest.draft.debug_outputs
            watches.append(LayerWatch(head, marked, watched, args.tolerance, "the draft head's "))
    return program, engine, watches


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr if they differ or cannot be run."""
    args = parse_args(argv)
    return run_command(PROG, lambda: verify(args))


if __name__ == "__main__":
    sys.exit(main())
