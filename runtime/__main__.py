"""``qwen4exp-generate BUNDLE "prompt"``: streams text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.llm import LLM, Prompt
from qwen4exp_trt.runtime.progress_line import loading_line
from qwen4exp_trt.runtime.runtime_options import add_runtime_options, llm_options

PROG = "qwen4exp-generate"

_SAMPLING_FLAGS = {
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "sample from that many tokens, 0 for all"),
    "top_p": (float, "sample from the most likely tokens of that total probability"),
    "min_p": (float, "drop tokens less likely than this share of the most likely one"),
    "repetition_penalty": (float, "above 1 discourages tokens of the prompt and the output"),
    "presence_penalty": (float, "above 0 discourages tokens of the output"),
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=PROG, description="Generate text from a bundle.")
    parser.add_argument("bundle", help="folder made by qwen4exp-build")
    parser.add_argument("prompt", help="the text to continue, or the user's message with --chat")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message (default: none)")
    parser.add_argument("--no-thinking", action="store_true", help="with --chat: turn thinking off")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable (default: none)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop at this text, may be repeated")
    sampling = parser.add_argument_group("sampling", "By default as the checkpoint's generation_config.json asks.")
    for name, (kind, text) in _SAMPLING_FLAGS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    add_runtime_options(parser)
    args = parser.parse_args(argv)
    if not args.chat and (args.system is not None or args.no_thinking):
        parser.error("--system and --no-thinking need --chat")
    return args


def generate(args: argparse.Namespace) -> None:
    """Load the bundle and print the text as it comes."""
    names = (*_SAMPLING_FLAGS, "max_tokens", "seed", "stop")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    with LLM(args.bundle, progress=loading_line().show, **llm_options(args)) as llm:
        params = replace(llm.default_sampling_params, **given)
        for chunk in llm.stream(_chat_prompt(llm, args) if args.chat else args.prompt, params):
            print(chunk.text, end="" if chunk.finish_reason is None else "\n", flush=True)


def _chat_prompt(llm: LLM, args: argparse.Namespace) -> Prompt:
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages.append({"role": "user", "content": args.prompt})
    text = llm.render_chat(messages, enable_thinking=False if args.no_thinking else None)
    return {"prompt": text, "add_special_tokens": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr for a user's mistake."""
    args = parse_args(argv)
    return run_command(PROG, lambda: generate(args))


if __name__ == "__main__":
    sys.exit(main())
