"""Measures what drafts are worth on the demo checkpoint: acceptance, and tokens of a step, behind held-out text.

    python benchmarks/drafts_demo.py

Each request continues a piece of the text. Prints a table and appends a line for each kind of drafts and sampling to
``benchmarks/results/drafts_demo.jsonl``. Steps are counted, not timed: the demo model is no larger than its draft head.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from results_file import ROOT, append_result

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.runtime import LLM, SamplingParams

DEMO = ROOT / "demo"
SPECULATE = ("mtp:1", "mtp:3", "mtp:5", "ngram:4")
SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=96, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.7, top_p=0.95, max_tokens=96, ignore_eos=True, seed=0),
}
NUM_PROMPTS, PROMPT_LEN, STRIDE = 16, 96, 400
"""Pieces of the held-out text, in tokens."""


@dataclass(frozen=True)
class Measurement:
    """One line of the result. ``num_steps``: of single sequences, after their prompts."""

    speculate: str
    sampling: str
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    acceptance_per_position: list[float]
    switched_off: int

    def __str__(self) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_per_position)
        tokens = self.num_tokens / self.num_steps
        return f"{self.speculate:<9}{self.sampling:<9}{tokens:>13.2f}  {rates:<26}{self.switched_off:>6}"


def measure(bundle: Path, speculate: str, sampling: str) -> Measurement:
    llm = LLM(bundle, speculate=speculate)
    assert llm.tokenizer is not None and llm.core.drafting is not None
    text = llm.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"), add_special_tokens=False)
    prompts = [text[STRIDE * index :][:PROMPT_LEN] for index in range(NUM_PROMPTS)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SAMPLING[sampling])
    # The first token is the prompt's step's; each later step gives one token and what it accepts.
    num_tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    num_accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    counters = llm.core.drafting.counters
    return Measurement(
        speculate,
        sampling,
        num_tokens,
        num_tokens - num_accepted,
        sum(output.metrics.num_draft_tokens for output in outputs),
        num_accepted,
        counters.acceptance_rates,
        counters.num_switched_off,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What drafts are worth on the demo checkpoint.")
    parser.add_argument("--speculate", choices=SPECULATE, action="append", help="default: all")
    chosen = parser.parse_args().speculate or SPECULATE
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "demo"
        options = {"activation_dtype": "float32", "max_seq_len": 512}
        build_bundle(BuildOptions(checkpoint=DEMO / "checkpoint", output=bundle, **options))
        print(f"{'drafts':<9}{'':<9}{'tokens a step':>13}  {'acceptance by position':<26}{'off':>6}")
        for speculate in chosen:
            for sampling in SAMPLING:
                measured = measure(bundle, speculate, sampling)
                print(measured, flush=True)
                append_result("drafts_demo", asdict(measured))


if __name__ == "__main__":
    main()
