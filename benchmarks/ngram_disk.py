"""Measures what an n-gram table on disk adds to a step: rows that are cold, kept, or read ahead.

    python benchmarks/ngram_disk.py [--gib N] [--folder FOLDER]

Writes a synthetic table of N GiB in shards (FP8, rows of 160 bytes as released), hashes random tokens and looks their
rows up, from a cold page cache. Prints a line a case and appends it to ``benchmarks/results/ngram_disk.jsonl``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from results_file import append_result
from safetensors.torch import save_file
from torch import Tensor

from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.ngram_table import TokenWindow
from qwen4exp_trt.runtime.specs import Literal, NgramRowsSpec, Source, TensorSpec, WeightSpec
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weights import transform

HEADS, WIDTH, SHARDS, VOCAB, EOS = 16, 160, 8, 248_000, 0
MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
CHUNK, STEP_SECONDS = 2048, 1.0
"""Tokens of a chunk of a prompt, and how long the step before it runs."""
TABLE = "layers.1.ple.table"


def write_table(folder: Path, gib: float) -> int:
    """Shards of a table, one file each; the number of rows."""
    rows = int(gib * 2**30) // WIDTH // SHARDS // HEADS * HEADS
    for shard in range(SHARDS):
        data = torch.randint(0, 120, (rows, WIDTH), dtype=torch.uint8).view(torch.float8_e4m3fn)
        path = folder / f"{shard}.safetensors"
        save_file({f"{TABLE}.{shard}": data}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return rows * SHARDS


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table_spec(num_rows: int) -> NgramRowsSpec:
    size = num_rows // HEADS
    table = transform("concat", *(Source(f"{TABLE}.{shard}") for shard in range(SHARDS)), dim=0)
    operands = (
        WeightSpec(TensorSpec("table", (num_rows, WIDTH), "float8_e4m3fn"), table),
        WeightSpec(TensorSpec("scales", (1,), "float32"), Literal("float32", (1,), (2.0**-12,))),
    )
    return NgramRowsSpec(
        "layers.1.ple.ngram_embeddings",
        ("T", HEADS * WIDTH),
        "bfloat16",
        multipliers=MULTIPLIERS,
        head_sizes=tuple(size - 2 * head - 1 for head in range(HEADS)),
        head_offsets=tuple(size * head for head in range(HEADS)),
        eos_token_id=EOS,
        gather="fp8_ple_gather",
        operands=operands,
    )


def step(tokens: list[int], context: int) -> dict[str, Tensor]:
    values = {
        "input_ids": tokens,
        "query_start_loc": [0, len(tokens)],
        "seq_lens": [context + len(tokens)],
        "slot_ids": [0],
        "num_seqs": [1],
    }
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}


def measure(rows: NgramRows, folder: Path) -> Iterator[tuple[str, float]]:
    """Cases and the milliseconds of one step of each."""
    generator, positions, prompt = torch.Generator().manual_seed(0), count(), list[int]()

    def tokens(number: int) -> list[int]:
        return torch.randint(1, VOCAB, (number,), generator=generator).tolist()

    def milliseconds(ids: list[int], context: int) -> float:
        begin = time.perf_counter()
        rows.complete(step(ids, context))
        return (time.perf_counter() - begin) * 1e3

    drop_from_cache(folder)
    decode = [(tokens(1), next(positions)) for _ in range(100)]
    yield "1 token, cold", statistics.median(milliseconds(*one) for one in decode)
    yield "1 token, kept", statistics.median(milliseconds(decode[index][0], index) for index in range(100))
    found: dict[str, list[float]] = {"cold": [], "read ahead": [], "kept": []}
    for _ in range(3):
        for name, times in found.items():
            if name != "kept":
                prompt = tokens(2 * CHUNK)
                drop_from_cache(folder)
            if name == "read ahead":
                rows.prefetch([TokenWindow(prompt, CHUNK, 2 * CHUNK)])
            rows.complete(step(prompt[:CHUNK], 0))
            if name == "read ahead":
                time.sleep(STEP_SECONDS)
            times.append(milliseconds(prompt[CHUNK:], CHUNK))
    yield from ((f"{CHUNK} tokens, {name}", statistics.median(times)) for name, times in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the table (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where it is written (default: the temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        num_rows = write_table(folder, args.gib)
        rows = NgramRows([table_spec(num_rows)], TensorReader(Checkpoint.open(folder)), num_slots=1)
        drop_from_cache(folder)
        rows.measure_disks()
        (disk,) = rows.info["disks"].values()
        times = dict(measure(rows, folder))
        for case, milliseconds in times.items():
            print(f"{case:28} {milliseconds:9.2f} ms a step")
        disk = {key: value for key, value in disk.items() if key != "path"}
        append_result("ngram_disk", {"gib": args.gib, "disk": disk, "ms": times})
        rows.close()


if __name__ == "__main__":
    main()
