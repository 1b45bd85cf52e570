"""``qwen4exp-eval BUNDLE TEXT``: perplexity of a text, and the distance from another bundle."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.evaluation import Evaluation, default_window, evaluate
from qwen4exp_trt.runtime.json_files import check_file_target, write_json
from qwen4exp_trt.runtime.llm import LLM
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.progress_line import ProgressLine, loading_line
from qwen4exp_trt.runtime.runtime_options import add_runtime_options, llm_options
from qwen4exp_trt.runtime.text_file import read_text

PROG = "qwen4exp-eval"

_NAME_WIDTH = 20


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=PROG, description="Measure how well a bundle predicts a text.")
    add = parser.add_argument
    add("bundle", type=Path, help="folder made by qwen4exp-build")
    add("text", type=Path, help="file with the text, UTF-8")
    add("--against", type=Path, metavar="BUNDLE", help="compare the predictions with those of this bundle")
    add(
        "--window",
        type=int,
        metavar="N",
        help="tokens that are predicted from each other; windows do not overlap and the first token of each is not "
        "predicted (default: 512, or the max_seq_len of the bundle if that is less)",
    )
    add("--max-tokens", type=int, metavar="N", help="use the first N tokens of the text (default: all)")
    add("--json", type=Path, metavar="FILE", help="also write the result there (default: no)")
    text = "where the checkpoint of the bundle of --against is now (default: where it was at the build)"
    add("--against-checkpoint", type=Path, metavar="FOLDER", help=text)
    add_runtime_options(parser)
    args = parser.parse_args(argv)
    if args.against is None and args.against_checkpoint is not None:
        parser.error("--against-checkpoint needs --against")
    return args


def run(args: argparse.Namespace) -> None:
    """Evaluate, printing progress on stderr and the result on stdout."""
    text = read_text(args.text, RequestError)
    if args.json is not None:
        check_file_target(args.json, "--json")
    llm = _load(args, args.bundle)
    base = None if args.against is None else _load(args, args.against, checkpoint=args.against_checkpoint)
    line = ProgressLine(lambda done, total: f"window {done} of {total}")
    result = evaluate(llm, text, window=args.window, max_tokens=args.max_tokens, base=base, progress=line.show)
    print(format_result(result))
    if args.json is not None:
        _write_json(args, result)


def _load(args: argparse.Namespace, bundle: Path, **options: Any) -> LLM:
    """A bundle with pages for one window only, unless asked otherwise: its full KV cache may be larger than the model.

    ``options`` replace those of ``args``.
    """
    limits = Manifest.load(bundle).limits
    window = default_window(limits.max_seq_len) if args.window is None else args.window
    num_blocks = min(max(-(-window // limits.block_size), 1), limits.max_num_blocks)
    return LLM(bundle, progress=loading_line().show, **{"num_blocks": num_blocks, **llm_options(args), **options})


def _write_json(args: argparse.Namespace, result: Evaluation) -> None:
    against = None if args.against is None else str(args.against)
    data = {"bundle": str(args.bundle), "text": str(args.text), "against": against, **asdict(result)}
    write_json(args.json, data)


def format_result(result: Evaluation) -> str:
    """The table on stdout."""
    rows = {
        "tokens": f"{result.num_tokens:,} in {result.num_windows:,} windows of {result.window:,}",
        "perplexity": f"{result.perplexity:.4f}",
    }
    if (comparison := result.comparison) is not None:
        change = result.perplexity / comparison.base_perplexity - 1
        rows["perplexity"] += f", {change:+.3%} from the base's {comparison.base_perplexity:.4f}"
        rows["KL(base || this)"] = f"mean {comparison.mean_kl:.6f}, 99.9th percentile {comparison.tail_kl:.6f} nats"
        rows["top-1 agreement"] = f"{comparison.top1_agreement:.3%}"
    return "\n".join(f"{name:<{_NAME_WIDTH}}  {value}" for name, value in rows.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr for a user's mistake."""
    args = parse_args(argv)
    return run_command(PROG, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
