"""Times the CUDA kernels on the GPU at hand, each beside a copy of the same bytes and its peers.

    python benchmarks/run_kernels.py [--peers FOLDER] [OP ...]

Runs ``benchmarks/kernels/<op>.py`` for each op (default: all), prints a line for each measurement, and appends them
to ``benchmarks/results/kernels.jsonl``. With a folder of peers' sources (``benchmarks/peers/sources.py`` says which),
``benchmarks/peers/<op>.py`` follows. The tests of an op (`make gpu`) come first.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path

import torch
from results_file import append_result

from qwen4exp_trt.plugins.registry import all_specs

KERNELS, PEERS = (Path(__file__).parent / name for name in ("kernels", "peers"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Time the CUDA kernels.")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="sources of the peers (default: none are run)")
    parser.add_argument("ops", nargs="*", metavar="OP")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    all_specs()
    failed = 0
    for op in args.ops or sorted({path.stem for path in (*KERNELS.glob("*.py"), *PEERS.glob("*.py"))}):
        if (KERNELS / f"{op}.py").is_file():
            failed += not _measure(f"kernels.{op}", op)
        if args.peers is not None and (PEERS / f"{op}.py").is_file() and op != "sources":
            failed += not _measure(f"peers.{op}", op, args.peers)
    return failed


def _measure(module: str, op: str, *args: Path) -> bool:
    try:
        for timing in importlib.import_module(module).measure(*args):
            print(timing, flush=True)
            append_result("kernels", {"op": op, **vars(timing), "fraction": round(timing.fraction, 4)})
    except Exception:  # the other ops are still worth their time
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
