"""Makes the demo checkpoint: `prepare` corpus and tokenizer, `train` the model, `evaluate` the result.

- `train_demo.py prepare --packages DIR --work DIR` reads the texts; writes tokenizer, tokens and heldout.txt.
- `train_demo.py train --work DIR --output DIR` trains, on a GPU if there is one; writes the checkpoint.
- `train_demo.py evaluate CHECKPOINT HELDOUT JSON` measures perplexity and samples greedy text, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_corpus import read_corpus
from demo_data import END_OF_TEXT, WindowSampler, cut_windows, encode_documents, encode_training_stream
from demo_evaluation import EVALUATION_LENGTH, evaluate_checkpoint
from demo_model import make_config, make_model
from demo_tokenizer import train_tokenizer
from demo_training import DemoTrainer, split_decay
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

DENSE_LENGTH, SELECTING_LENGTH = 256, 512
LOSS_WEIGHTS = {"text": 1.0, "indexer": 0.1, "balance": 0.01, "loop": 0.5}


def prepare(args: argparse.Namespace) -> None:
    corpus = read_corpus(args.packages)
    tokenizer = train_tokenizer([*corpus.novels, *corpus.bible])
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.work / "tokenizer")
    stream = encode_training_stream(tokenizer, corpus, random.Random(args.seed))
    np.save(args.work / "train.npy", stream)
    np.save(args.work / "heldout.npy", encode_documents(tokenizer, corpus.heldout))
    heldout_text = "".join(document + END_OF_TEXT for document in corpus.heldout)
    (args.work / "heldout.txt").write_text(heldout_text, encoding="utf-8")
    print(f"{stream.size} training tokens, {len(heldout_text)} held-out characters in {args.work}")


def train(args: argparse.Namespace) -> None:
    """Dense attention first, then the indexer's selection on longer windows for the last fifth of the steps.

    Loops are shown in the second half.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer = AutoTokenizer.from_pretrained(args.work / "tokenizer")
    model = make_model(make_config(tokenizer), args.seed).to(device)
    model.model.visual.requires_grad_(False)
    turn_token_ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    trainer = DemoTrainer(model, (turn_token_ids[0], turn_token_ids[1]), args.dropout)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(split_decay(trained, args.weight_decay), betas=(0.9, 0.95))
    generator = torch.Generator(device).manual_seed(args.seed)
    sampler = WindowSampler(_load_tokens(args.work / "train.npy", device), generator)
    heldout = cut_windows(_load_tokens(args.work / "heldout.npy", device), EVALUATION_LENGTH)
    started = time.monotonic()
    for step in range(args.steps):
        trainer.select_tokens = step >= 0.8 * args.steps
        length = SELECTING_LENGTH if trainer.select_tokens else DENSE_LENGTH
        rows = max(8, args.tokens_per_step // length)
        tokens = sampler.draw_windows(rows, length)
        loops = sampler.draw_loops(rows // 8, length) if step >= 0.5 * args.steps else None
        losses = trainer.compute_losses(tokens, loops)
        torch.stack([LOSS_WEIGHTS[name] * loss for name, loss in losses.items()]).sum().backward()
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * _scale_learning_rate(step, args.steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.report_every == 0 or step + 1 == args.steps:
            report = " ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
            report += f" held-out {_heldout_loss(trainer, heldout):.3f}"
            print(f"step {step + 1} {report} {time.monotonic() - started:.0f} s", flush=True)
    save_checkpoint(model, args.work / "tokenizer", args.output)


def _load_tokens(path: Path, device: torch.device) -> Tensor:
    return torch.from_numpy(np.load(path).astype(np.int64)).to(device)


def _scale_learning_rate(step: int, steps: int) -> float:
    warmup = max(1, steps // 25)
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@torch.no_grad()
def _heldout_loss(trainer: DemoTrainer, windows: Tensor) -> float:
    trainer.model.eval()
    total = sum(trainer.compute_losses(rows)["text"].item() * len(rows) for rows in windows.split(32))
    trainer.model.train()
    return total / len(windows)


def save_checkpoint(model: Any, tokenizer: Path, output: Path) -> None:
    """Writes the model (bfloat16), generation settings and the files of the folder `tokenizer`."""
    vocabulary = AutoTokenizer.from_pretrained(tokenizer).get_vocab()
    end_of_turn, end_of_text = vocabulary["<|im_end|>"], vocabulary[END_OF_TEXT]
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=0.95,
        top_k=20,
        bos_token_id=end_of_text,
        eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=end_of_text,
    )
    model.to(device=torch.device("cpu"), dtype=torch.bfloat16).save_pretrained(output)
    shutil.copytree(tokenizer, output, dirs_exist_ok=True)
    for path in output.iterdir():
        path.chmod(0o644)


def evaluate(args: argparse.Namespace) -> None:
    report = json.dumps(evaluate_checkpoint(args.checkpoint, args.heldout), indent=2)
    args.report.write_text(report + "\n", encoding="utf-8")
    print(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    preparing = commands.add_parser("prepare")
    preparing.set_defaults(run=prepare)
    preparing.add_argument("--packages", type=Path, default=Path("/"), help="where the Debian packages are unpacked")
    preparing.add_argument("--work", type=Path, required=True)
    preparing.add_argument("--seed", type=int, default=0)
    training = commands.add_parser("train")
    training.set_defaults(run=train)
    training.add_argument("--work", type=Path, required=True)
    training.add_argument("--output", type=Path, required=True)
    training.add_argument("--steps", type=int, default=1600)
    training.add_argument("--tokens-per-step", type=int, default=32768)
    training.add_argument("--learning-rate", type=float, default=4e-3)
    training.add_argument("--weight-decay", type=float, default=0.4)
    training.add_argument("--dropout", type=float, default=0.15)
    training.add_argument("--report-every", type=int, default=200)
    training.add_argument("--seed", type=int, default=0)
    evaluating = commands.add_parser("evaluate")
    evaluating.set_defaults(run=evaluate)
    evaluating.add_argument("checkpoint", type=Path)
    evaluating.add_argument("heldout", type=Path)
    evaluating.add_argument("report", type=Path)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
