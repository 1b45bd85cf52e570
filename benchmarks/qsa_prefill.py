"""Times the indexer, the selection and the attention of whole prompts, beside torch's dense causal flash attention.

    python benchmarks/qsa_prefill.py [--quick]

Prompts go in chunks of 8,192 tokens, each a replayed CUDA graph of the three ops. Selections are `clustered`, shared
by neighbouring queries as `qsa_prompt.py` says, or `random`. Prints, and appends to
``benchmarks/results/qsa_prefill.jsonl``, one line for each prompt, then how the times grow with its length: attention
by a straight line, and the selection by a line and a term for the scores, which grow with the square. Exits with 1 when
a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable

import torch
from qsa_prompt import BUDGET, HEAD_DIM, HEADS, INDEX_DIM, INDEX_HEADS, Prompt, shared
from results_file import append_result
from torch.nn.attention import SDPBackend, sdpa_kernel

from qwen4exp_trt.plugins.registry import all_specs

PROMPTS, QUICK_PROMPTS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144), (32_768, 131_072)
NOISES = {"clustered": 0.3, "random": math.inf}
BARS = {32_768: 1.0, 131_072: 3.0}
"""How much faster than flash attention a clustered prompt of so many tokens has to be."""
ROUNDS = 3
TILE_ROWS = 5
"""Neighbouring rows whose unions are reported: those of a tile of the attention."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Time QSA over whole prompts.")
    parser.add_argument("--quick", action="store_true", help="only the prompts with a bar")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    all_specs()
    prompts = QUICK_PROMPTS if args.quick else PROMPTS
    flash = {length: flash_milliseconds(length) for length in prompts if length in BARS}
    missed = False
    for kind, noise in NOISES.items():
        lines = [measure(kind, noise, length, flash.get(length)) for length in prompts]
        for line in lines:
            append_result("qsa_prefill", line)
            bar = BARS.get(int(line["tokens"]), 0.0) if kind == "clustered" else 0.0
            missed |= line.get("speedup", math.inf) < bar
        if len(lines) > 3:
            print_growth(kind, lines)
    return int(missed)


def measure(kind: str, noise: float, length: int, flash: float | None) -> dict[str, float]:
    """Milliseconds of a prompt's ops, and what its selections share."""
    gc.collect()
    torch.cuda.empty_cache()
    prompt = Prompt(length, noise)
    times = {"indexer": 0.0, "select": 0.0, "attention": 0.0}
    total, selected = 0.0, torch.empty(0)
    for start in range(0, length, prompt.chunk):
        ops, step = prompt.ops(start), prompt.step(start)
        index_q = ops["indexer"]()
        selected = ops["select"](index_q)
        total += milliseconds(step)
        calls = (("indexer", ops["indexer"]), ("select", lambda ops=ops, q=index_q: ops["select"](q)))
        calls = (*calls, ("attention", lambda ops=ops, groups=selected: ops["attention"](groups)))
        for name, call in calls:
            times[name] += milliseconds(call)
    overlap, union = shared(selected, TILE_ROWS)
    line: dict[str, float] = {"tokens": length, "milliseconds": total, **times, "overlap": overlap, "union": union}
    line["select_tflops"] = prompt.scoring_flops / times["select"] / 1e9
    line["attention_tflops"] = prompt.attention_flops / times["attention"] / 1e9
    if flash is not None:
        line |= {"flash": flash, "speedup": flash / total}
    beside = f"  flash {flash:7.2f} ms, {flash / total:4.2f} x" if flash is not None else ""
    print(
        f"{kind:9} {length:7} tokens {total:8.2f} ms = indexer {times['indexer']:.2f} + select {times['select']:.2f} + "
        f"attention {times['attention']:.2f} ({line['attention_tflops']:.0f} TFLOP/s); a row shares {overlap:.0%} with "
        f"the next, {TILE_ROWS} rows select {union:.2f} x one's{beside}",
        flush=True,
    )
    return {"kind": kind, **line}  # pyright: ignore[reportReturnType]


def milliseconds(work: Callable[[], object]) -> float:
    """The best of some replays of a graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return best_of(graph.replay)


def best_of(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def flash_milliseconds(length: int) -> float:
    """Torch's dense causal attention of as many heads, keys and values expanded to all of them."""
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def work(length: int = length) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q[:, :, :length], k[:, :, :length], v[:, :, :length], is_causal=True
        )

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        work(min(length, 16_384))
        return best_of(work, 2)


def print_growth(kind: str, lines: list[dict[str, float]]) -> None:
    """Least squares over the lengths, each weighted by its own time: how far the times are from a law."""
    tokens = torch.tensor([line["tokens"] for line in lines], dtype=torch.float64)
    sparse, scored = tokens - BUDGET, (tokens**2 - BUDGET**2) * INDEX_HEADS * INDEX_DIM / 4
    for name, terms in (("attention", (sparse,)), ("select", (sparse, scored))):
        times = torch.tensor([line[name] for line in lines], dtype=torch.float64)
        matrix = torch.stack(terms, 1) / times[:, None]
        factors = torch.linalg.lstsq(matrix, torch.ones(len(times), 1, dtype=torch.float64)).solution[:, 0]
        errors = (matrix @ factors - 1).abs()
        scores = f" + {1e-9 / float(factors[1]):.0f} TFLOP/s of scores" if len(terms) > 1 else ""
        print(
            f"{kind:9} {name}: {1e6 * float(factors[0]):.1f} ns a token beyond {BUDGET}{scores}; "
            f"furthest {float(errors.max()):.0%}, on average {float(errors.mean()):.0%} off",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
