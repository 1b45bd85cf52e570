"""Measures what each precision costs the demo checkpoint: perplexity, and distance from float32, on held-out text.

    python benchmarks/evaluate_demo.py

Prints a table and appends a line for each precision to ``benchmarks/results/evaluate_demo.jsonl``.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from results_file import ROOT, append_result

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.options import PRECISIONS, BuildOptions
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.evaluation import evaluate

BASE = "float32"
WINDOW = 512


def main() -> int:
    text = (ROOT / "demo" / "heldout.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        llms = {}
        for precision in PRECISIONS:
            output = Path(folder) / precision
            checkpoint = ROOT / "demo" / "checkpoint"
            build_bundle(BuildOptions(checkpoint=checkpoint, output=output, precision=precision), lambda stage: None)
            llms[precision] = LLM(output)
        print(f"{'precision':<12}{'tokens':>8}{'perplexity':>12}{'mean KL':>12}{'99.9% KL':>12}{'top-1':>10}")
        for precision, llm in llms.items():
            result = evaluate(llm, text, window=WINDOW, base=llms[BASE])
            distance = result.comparison
            assert distance is not None
            print(
                f"{precision:<12}{result.num_tokens:>8}{result.perplexity:>12.4f}{distance.mean_kl:>12.6f}"
                f"{distance.tail_kl:>12.6f}{distance.top1_agreement:>10.4%}"
            )
            append_result("evaluate_demo", {"precision": precision, "base": BASE, **asdict(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
