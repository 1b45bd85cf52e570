"""``qwen4exp-bench BUNDLE``: decode and prefill tables with the roofline beside them, and one file with all of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from qwen4exp_trt.runtime.bench.cases import EFFORTS, Selection
from qwen4exp_trt.runtime.bench.session import DEFAULT_DRAFTS, Session, Settings
from qwen4exp_trt.runtime.bench.tables import tables
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.json_files import check_file_target
from qwen4exp_trt.runtime.runtime_options import add_runtime_options, llm_options

PROG = "qwen4exp-bench"
SOME_FAILED = 1
"""Exit code of a run that measured all it could."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog=PROG,
        description="Time decode steps, prompts and whole requests of a bundle on this machine, beside what their "
        "bytes and products take at least.",
    )
    add = parser.add_argument
    add("bundle", type=Path, help="folder made by qwen4exp-build")
    add("--json", type=Path, metavar="FILE", help="keep everything there, from the first case on (default: no)")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="few cases, of two seconds each")
    effort.add_argument("--full", action="store_true", help="all cases, also prompts of the longest sequence")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--decode-only", action="store_true", help="no prompts and no whole requests")
    part.add_argument("--prefill-only", action="store_true", help="no decode steps and no whole requests")
    for name, text in (
        ("batch", "sequences in a step (default: powers of two up to the bundle's)"),
        ("context", "tokens before a decode step (default: 2048, 32768, 131072 and the longest)"),
        ("prompt", "tokens of prompts (default: 512, 2048, 8192)"),
        ("drafts", "drafts of a sequence in steps that verify some; 0 for none (default: 1, 3, 7)"),
    ):
        add(f"--{name}", type=_numbers(least=0 if name == "drafts" else 1), metavar="N[,N]", help=text)
    add("--iterations", type=_number(least=1), metavar="N", help="timed steps of a case, at most (default: 60)")
    add("--seconds", type=_positive, metavar="S", help="after which a case ends when it has three (default: 6)")
    add("--check", action="store_true", help="compare with the program op by op: logits, and greedy tokens")
    text = "measure with random weights, as those of the checkpoint are not there (default seed: 0)"
    add("--random-weights", type=_number(least=0), nargs="?", const=0, metavar="SEED", help=text)
    add("--host-name", action="store_true", help="write this machine's name into the file (default: no)")
    add_runtime_options(parser)
    parser.epilog = (
        "Differs from other commands: --enable-prefix-caching is off, and a bundle with a draft head is loaded with it "
        f"(--speculate {DEFAULT_DRAFTS}) unless --drafts is 0."
    )
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> Settings:
    name = "quick" if args.quick else "full" if args.full else "default"
    effort = EFFORTS[name]
    if args.iterations is not None:
        effort = replace(effort, iterations=args.iterations, warm_up=min(effort.warm_up, args.iterations))
    if args.seconds is not None:
        effort = replace(effort, seconds=args.seconds)
    is_one_part = args.decode_only or args.prefill_only
    selection = Selection(
        decode=not args.prefill_only,
        prefill=not args.decode_only,
        generate=not is_one_part,
        batches=args.batch,
        contexts=args.context,
        prompts=args.prompt,
        drafts=args.drafts,
    )
    return Settings(
        bundle=args.bundle,
        json=args.json,
        effort_name=name,
        effort=effort,
        selection=selection,
        llm_options=llm_options(args),
        random_seed=args.random_weights,
        with_agreement=args.check,
        with_host_name=args.host_name,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if a case failed, which is named; 2 with one line on stderr if nothing could be measured; 130 if
    interrupted. What was measured is printed, and in the file, in any case."""
    session = Session(settings_of(parse_args(argv)))
    code = run_command(PROG, lambda: run(session))
    return code or (SOME_FAILED if session.document.failed else 0)


def run(session: Session) -> None:
    """Measure, and print what was measured even if it was interrupted."""
    if session.settings.json is not None:
        check_file_target(session.settings.json, "--json")
    try:
        session.run()
    finally:
        document = session.document
        if document.decode or document.prefill or document.generate or document.failed:
            print("\n".join(tables(document)), flush=True)


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        try:
            values = tuple(int(part) for part in text.split(","))
        except ValueError:
            values = ()
        if not values or min(values) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: integers from {least} on were expected, with commas between")
        return values

    return parse


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r}: one integer from {least} on was expected")
        return int(text)

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seconds above 0 was expected")
    return value


if __name__ == "__main__":
    sys.exit(main())
