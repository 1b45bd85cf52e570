"""Times the CUDA kernels on the GPU at hand, each beside a copy of the same bytes and its peers.

    python benchmarks/run_kernels.py [OP ...]

Runs ``benchmarks/kernels/<op>.py`` for each op (default: all), prints a line for each measurement, and appends them
to ``benchmarks/results/kernels.jsonl``. The tests of an op (`make gpu`) come first.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

import torch
from results_file import append_result

from qwen4exp_trt.plugins.registry import all_specs

FOLDER = Path(__file__).parent / "kernels"


def main(ops: list[str]) -> int:
    all_specs()
    failed = 0
    for op in ops or sorted(path.stem for path in FOLDER.glob("*.py")):
        try:
            for timing in importlib.import_module(f"kernels.{op}").measure():
                print(timing, flush=True)
                append_result("kernels", {"op": op, **vars(timing), "fraction": round(timing.fraction, 4)})
        except Exception:
            traceback.print_exc()
            failed += 1
    return failed


if __name__ == "__main__":
    assert torch.cuda.is_available(), "needs a CUDA GPU"
    sys.exit(main(sys.argv[1:]))
