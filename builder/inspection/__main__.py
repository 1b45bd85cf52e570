"""``qwen4exp-inspect BUNDLE``: what a bundle holds, layer by layer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import torch

from qwen4exp_trt.builder.inspection.bundle import StepRequest, inspect_bundle
from qwen4exp_trt.builder.inspection.diff import format_differences, list_differences
from qwen4exp_trt.builder.inspection.document import Inspection
from qwen4exp_trt.builder.inspection.engine_inspector import with_inspector
from qwen4exp_trt.builder.inspection.page import render_page
from qwen4exp_trt.builder.inspection.text import format_inspection
from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.cuda_device import device_from_name
from qwen4exp_trt.runtime.json_files import check_file_target, write_text
from qwen4exp_trt.runtime.streams import CudaStream, Stream

PROG = "qwen4exp-inspect"
DIFFERENT = 1
"""The exit code of ``--diff`` for bundles that differ."""
ALL = "*"
"""The ``--filter`` that leaves out nothing."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=PROG, description="Say what a bundle holds, layer by layer, from its files alone.")
    add = parser.add_argument
    add("bundle", type=Path, help="folder made by qwen4exp-build")
    add("--batch", type=int, default=1, metavar="N", help="sequences of the decoding step (default: %(default)s)")
    add(
        "--context",
        type=int,
        metavar="N",
        help="tokens of each before the decoding step (default: all but one of the longest sequence)",
    )
    text = "tokens of a prompt before the chunk of the prefill step (default: %(default)s)"
    add("--prefill-context", type=int, default=0, metavar="N", help=text)
    add("--all", action="store_true", help="list each layer by itself (default: those of one kind are one row)")
    add(
        "--filter",
        default=ALL,
        metavar="PATTERN",
        help="list only ops, states and weights of such names: 'layers.3.*', '*.mlp.*' (default: all)",
    )
    add("--engine", action="store_true", help="load the engines on --device and add what they say of their layers")
    add("--device", metavar="DEVICE", help="where --engine loads them (default: cuda)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="everything, as JSON")
    output.add_argument("--html", action="store_true", help="everything, as a page that needs nothing else")
    output.add_argument("--diff", type=Path, metavar="BUNDLE", help="how the bundle differs from this one")
    add("-o", "--output", type=Path, metavar="FILE", help="where to write it (default: stdout)")
    args = parser.parse_args(argv)
    is_whole = args.json or args.html
    if args.all and (is_whole or args.diff is not None):
        parser.error("--all is for the text: it changes nothing of --json, --html and --diff")
    if args.filter != ALL and is_whole:
        parser.error("--filter is for the text and --diff: --json and --html hold everything")
    if args.engine and args.diff is not None:
        parser.error("--engine adds nothing to --diff")
    if args.device is not None and not args.engine:
        parser.error("--device needs --engine")
    return args


def inspect(
    args: argparse.Namespace,
    trt: ModuleType | None = None,
    make_stream: Callable[[torch.device], Stream] = CudaStream,
) -> int:
    """Write what is asked for; returns 1 if ``--diff`` found a difference, else 0."""
    if args.output is not None:
        check_file_target(args.output, "--output")
    request = StepRequest(args.batch, args.context, args.prefill_context)
    inspection = inspect_bundle(args.bundle, request)
    if args.engine:
        device = device_from_name(args.device or "cuda")
        inspection = with_inspector(inspection, args.bundle, device, make_stream, trt)
    if args.diff is not None:
        other = inspect_bundle(args.diff, request)
        _check_filter(args.filter, inspection, other)
        differences = list_differences(inspection, other, args.filter)
        _write(format_differences(differences), args.output)
        return DIFFERENT if differences else 0
    if args.json:
        text = json.dumps(inspection.to_json(), indent=1)
    elif args.html:
        text = render_page(inspection)
    else:
        _check_filter(args.filter, inspection)
        text = format_inspection(inspection, not args.all, args.filter)
    _write(text, args.output)
    return 0


def _check_filter(pattern: str, *inspections: Inspection) -> None:
    parts = [part for inspection in inspections for part in inspection.parts]
    names = [op.path for part in parts for op in part.ops]
    names += [each.name for part in parts for each in (*part.states, *part.weights)]
    if not any(fnmatchcase(name, pattern) for name in names):
        raise RequestError(f"--filter {pattern!r}: no op, state or weight has such a name; one is {names[0]!r}")


def _write(text: str, path: Path | None) -> None:
    if path is None:
        print(text)
    else:
        write_text(path, f"{text}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if ``--diff`` found a difference, or 2 with one line on stderr for a user's mistake."""
    args = parse_args(argv)
    return run_command(PROG, lambda: inspect(args))


if __name__ == "__main__":
    sys.exit(main())
