"""Gives the demo checkpoint a draft head (MTP): `train` it, `evaluate` how many of its drafts are accepted.

- `train_demo_draft.py train CHECKPOINT --work DIR` learns from the corpus that `train_demo.py prepare` left in DIR and
  puts the head into CHECKPOINT: a shard of its own, the index, keys of the config. The model's tensors stay.
- `train_demo_draft.py evaluate CHECKPOINT HELDOUT JSON` measures acceptance on held-out and on greedy text.

Training runs in float32, on a GPU if there is one. On one CPU thread `--windows 1000 --rows 4 --steps 750
--learning-rate 2e-3` takes a quarter of an hour, and 51% of first drafts are accepted on held-out text instead of 61%.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_checkpoint import add_draft_head, read_draft_head
from demo_draft_evaluation import evaluate_drafts
from demo_draft_head import make_draft_head
from demo_draft_training import STEP_WEIGHTS, ChainedDrafts, FrozenTarget, draft_losses
from demo_training import split_decay
from torch import Tensor
from transformers import AutoTokenizer, Qwen4ExpForConditionalGeneration

WINDOW = 256
LOSS_WEIGHTS = {f"draft {step}": weight for step, weight in enumerate(STEP_WEIGHTS, start=1)}
LOSS_WEIGHTS |= {"indexer": 0.1, "balance": 0.01}


def load_model(checkpoint: Path) -> Any:
    return Qwen4ExpForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


def train(args: argparse.Namespace) -> None:
    """The target runs over each window once; the head sees what it made of them several times."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(args.checkpoint)
    head = make_draft_head(model.model.language_model).to(device)
    target = FrozenTarget(model.to(device))
    drafts = ChainedDrafts(head, target)
    started = time.monotonic()
    windows = _draw_windows(np.load(args.work / "train.npy"), args.windows, args.rows, target.ratio, rng).to(device)
    stacks = [target.run(rows).stack.to(torch.bfloat16) for rows in windows]
    print(f"{args.windows} windows of {windows.shape[-1]} tokens {time.monotonic() - started:.0f} s", flush=True)
    optimizer = torch.optim.AdamW(split_decay(head.named_parameters(), args.weight_decay), betas=(0.9, 0.95))
    sums: dict[str, Tensor | float] = {}
    for step, batch in zip(range(1, args.steps + 1), _shuffled(len(windows), rng), strict=False):
        losses = draft_losses(drafts, windows[batch], target.from_stack(stacks[batch].float()))
        torch.stack([LOSS_WEIGHTS[name] * loss for name, loss in losses.items()]).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * _scale_learning_rate(step, args.steps)
        optimizer.step()
        optimizer.zero_grad()
        sums = {name: sums.get(name, 0.0) + loss.detach() for name, loss in losses.items()}
        if step % args.report_every == 0 or step == args.steps:
            count = (step - 1) % args.report_every + 1
            means = " ".join(f"{name} {total / count:.3f}" for name, total in sums.items())
            print(f"step {step} {means} {time.monotonic() - started:.0f} s", flush=True)
            sums = {}
    add_draft_head(args.checkpoint, head)


def _draw_windows(stream: np.ndarray, count: int, rows: int, ratio: int, rng: random.Random) -> Tensor:
    """[count / rows, rows, WINDOW + ratio] token ids."""
    length = WINDOW + ratio
    starts = rng.sample(range((len(stream) - length) // length), count)
    windows = np.stack([stream[start * length : (start + 1) * length] for start in starts])
    return torch.from_numpy(windows.astype(np.int64)).unflatten(0, (-1, rows))


def _shuffled(count: int, rng: random.Random) -> Iterator[int]:
    """All of 0 to `count` - 1, again and again, in another order each time."""
    while True:
        yield from rng.sample(range(count), count)


def _scale_learning_rate(step: int, steps: int) -> float:
    warmup = max(1, steps // 20)
    return min(step / warmup, 0.5 * (1.01 + math.cos(math.pi * step / steps)))


def evaluate(args: argparse.Namespace) -> None:
    target = FrozenTarget(load_model(args.checkpoint))
    drafts = ChainedDrafts(read_draft_head(args.checkpoint, target.text_model), target)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    ids = tokenizer.backend_tokenizer.encode(args.heldout.read_text(encoding="utf-8")).ids
    report = json.dumps(evaluate_drafts(drafts, load_model(args.checkpoint), torch.tensor(ids)), indent=2)
    args.report.write_text(report + "\n", encoding="utf-8")
    print(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.set_defaults(run=train)
    training.add_argument("checkpoint", type=Path)
    training.add_argument("--work", type=Path, required=True)
    training.add_argument("--windows", type=int, default=11136)
    training.add_argument("--rows", type=int, default=32, help="windows in a step")
    training.add_argument("--steps", type=int, default=1440)
    training.add_argument("--learning-rate", type=float, default=4e-3)
    training.add_argument("--weight-decay", type=float, default=0.05)
    training.add_argument("--report-every", type=int, default=50)
    training.add_argument("--seed", type=int, default=0)
    evaluating = commands.add_parser("evaluate")
    evaluating.set_defaults(run=evaluate)
    evaluating.add_argument("checkpoint", type=Path)
    evaluating.add_argument("heldout", type=Path)
    evaluating.add_argument("report", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__":
    main()
