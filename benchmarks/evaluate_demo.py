"""Measures what each precision costs the demo checkpoint: perplexity, and distance from float32, on held-out text.

    python benchmarks/evaluate_demo.py

Prints a table and appends a line for each precision to ``benchmarks/results/evaluate_demo.jsonl``. Exits with 1 when
NVFP4 loses more perplexity against BF16 than its bar.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from results_file import ROOT, append_result

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.evaluation import Evaluation, evaluate

DEMO = ROOT / "demo"
W4A4 = {"precision": "nvfp4-w4a4", "calibration": DEMO / "calibration.txt"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "bf16", "activation_dtype": "float32"},
    "bf16": {"precision": "bf16"},
    "bf16, KV fp8": {"precision": "bf16", "kv_cache_dtype": "fp8"},
    "nvfp4, head kept": {"precision": "nvfp4", "keep": ("lm_head.*",)},
    "nvfp4": {"precision": "nvfp4"},
    "nvfp4, table nvfp4": {"precision": "nvfp4", "ple": "nvfp4"},
    "nvfp4-w4a4": W4A4,
    "nvfp4-w4a4, table nvfp4, KV fp8": {**W4A4, "ple": "nvfp4", "kv_cache_dtype": "fp8"},
}
"""Name -> options of the build. The demo checkpoint is BF16, so that precision checkpoint is bf16."""
BASE = "float32"
WINDOW = 512
BAR = ("nvfp4", "bf16", 1.03)
"""Perplexity of the first over that of the second, at most."""
_NAME_WIDTH = max(map(len, PRECISIONS)) + 2


def build(name: str, folder: Path) -> LLM:
    output = folder / name.replace(" ", "_").replace(",", "")
    build_bundle(BuildOptions(checkpoint=DEMO / "checkpoint", output=output, **PRECISIONS[name]))
    return LLM(output)


def format_row(name: str, result: Evaluation) -> str:
    distance = result.comparison
    assert distance is not None
    change = result.perplexity / distance.base_perplexity - 1
    return (
        f"{name:<{_NAME_WIDTH}}{result.num_tokens:>8}{result.perplexity:>12.4f}{change:>9.2%}"
        f"{distance.mean_kl:>12.6f}{distance.tail_kl:>12.6f}{distance.top1_agreement:>10.2%}"
    )


def main() -> int:
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    perplexity = {}
    with tempfile.TemporaryDirectory() as folder:
        base = build(BASE, Path(folder))
        header = f"{'tokens':>8}{'perplexity':>12}{'change':>9}{'mean KL':>12}{'99.9% KL':>12}{'top-1':>10}"
        print(f"{'precision':<{_NAME_WIDTH}}{header}")
        for name in PRECISIONS:
            result = evaluate(build(name, Path(folder)), text, window=WINDOW, base=base)
            print(format_row(name, result), flush=True)
            perplexity[name] = result.perplexity
            append_result("evaluate_demo", {"precision": name, "base": BASE, **asdict(result)})
    name, other, bar = BAR
    if perplexity[name] > bar * perplexity[other]:
        print(f"{name} has more than {bar:g} times the perplexity of {other}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
