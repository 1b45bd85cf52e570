"""``qwen4exp-generate BUNDLE "prompt"``: streams text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qwen4exp_trt.errors import Q4eError
from qwen4exp_trt.runtime.backend import BACKENDS
from qwen4exp_trt.runtime.llm import LLM

_SAMPLING_FLAGS = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "seed": int,
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="qwen4exp-generate", description="Generate text from a bundle.")
    parser.add_argument("bundle", help="folder made by qwen4exp-build")
    parser.add_argument("prompt", help="the text to continue, or the user's message with --chat")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the chat template")
    parser.add_argument("--no-thinking", action="store_true", help="with --chat: turn thinking off")
    parser.add_argument("--system", help="with --chat: a system message")
    parser.add_argument("--backend", choices=BACKENDS, default="eager")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", help="where the checkpoint is now, if it moved since the build")
    parser.add_argument("--stop", action="append", help="stop at this text (may be repeated)")
    for name, kind in _SAMPLING_FLAGS.items():
        default = 128 if name == "max_tokens" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    return parser.parse_args(argv)


def generate(args: argparse.Namespace) -> None:
    """Load the bundle and print the text as it comes."""
    llm = LLM(args.bundle, backend=args.backend, device=args.device, checkpoint=args.checkpoint)
    given = {name: getattr(args, name) for name in (*_SAMPLING_FLAGS, "stop") if getattr(args, name) is not None}
    params = replace(llm.default_sampling_params, **given)
    prompt: Any = args.prompt
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        thinking = False if args.no_thinking else None
        text = llm.render_chat([*system, {"role": "user", "content": args.prompt}], enable_thinking=thinking)
        prompt = {"prompt": text, "add_special_tokens": False}
    for chunk in llm.stream(prompt, params):
        print(chunk.text, end="", flush=True)
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr for a user's mistake."""
    args = parse_args(argv)
    try:
        generate(args)
    except Q4eError as error:
        print(f"qwen4exp-generate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
