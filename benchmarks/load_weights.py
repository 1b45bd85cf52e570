"""Measures how fast weights are loaded from a cold page cache, beside a plain sequential read of the same files.

    python benchmarks/load_weights.py [--gib N] [--folder FOLDER] [--device cpu|cuda]

Writes a synthetic checkpoint (one NVFP4 tensor for each projection of each expert, and BF16 shards) to a temporary
folder, prints a line for each way of loading it, and appends it to ``benchmarks/results/load_weights.jsonl``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_file import append_result
from safetensors.torch import save_file
from torch import Tensor

from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.specs import Source, WeightRecipe
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weights import transform

EXPERTS, ROWS, COLUMNS = 256, 640, 2560
SHARDS, SHARD_ROWS = 16, 6400
"""Of one file: experts' projections in NVFP4 of [640, 2560], and BF16 shards of [6400, 2560]."""
CHUNK = 8 << 20


def write_file(path: Path) -> None:
    """A file of 0.7 GiB, on the disk and not only in the page cache."""
    tensors: dict[str, Tensor] = {}
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scales = torch.ones(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn)
    shard = torch.randn(SHARD_ROWS, COLUMNS).bfloat16()
    for expert in range(EXPERTS):
        tensors[f"{path.stem}.{expert}.codes"] = codes.clone()
        tensors[f"{path.stem}.{expert}.blocks"] = scales.clone()
        tensors[f"{path.stem}.{expert}.scale"] = torch.tensor(0.01)
    for index in range(SHARDS):
        tensors[f"{path.stem}.shard_{index}"] = shard.clone()
    save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def stored_recipes(stem: str) -> list[WeightRecipe]:
    """Every tensor of a file, joined as it is."""
    parts = [[Source(f"{stem}.{expert}.{part}") for expert in range(EXPERTS)] for part in ("codes", "blocks", "scale")]
    shards = [Source(f"{stem}.shard_{index}") for index in range(SHARDS)]
    return [*(transform("stack", *sources) for sources in parts), transform("concat", *shards, dim=0)]


def dequantized_recipes(stem: str) -> list[WeightRecipe]:
    """The experts of a file in BF16."""
    experts = [
        transform("dequantize_nvfp4", *(Source(f"{stem}.{expert}.{part}") for part in ("codes", "blocks", "scale")))
        for expert in range(EXPERTS)
    ]
    return [transform("cast", transform("stack", *experts), dtype="bfloat16")]


def read_plainly(paths: list[Path]) -> int:
    buffer = bytearray(CHUNK)
    count = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                count += read
    return count


def memory(field: str) -> int:
    """Bytes of this process, by /proc."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def load(
    folder: Path, paths: list[Path], recipes_of: Callable[[str], list[WeightRecipe]], device: str
) -> dict[str, Any]:
    """Load everything; ``beside`` is host memory at the peak without the results, ``device_beside`` the GPU's."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = memory("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    with TensorReader(Checkpoint.open(folder)) as reader:
        results = [materialize(recipe, reader, device) for path in paths for recipe in recipes_of(path.stem)]
    num_bytes = sum(result.nbytes for result in results)
    measured: dict[str, Any] = {"result_bytes": num_bytes}
    if device == "cuda":
        torch.cuda.synchronize()
        measured["device_beside"] = torch.cuda.max_memory_allocated() - num_bytes
        num_bytes = 0
    return measured | {"beside": memory("VmHWM:") - before - num_bytes}


def measure(name: str, paths: list[Path], device: str, run: Callable[[], dict[str, Any]], num_bytes: int) -> None:
    for path in paths:
        drop_from_cache(path)
    begin = time.perf_counter()
    measured = run()
    seconds = time.perf_counter() - begin
    beside = f", {measured['beside'] / 2**20:.0f} MiB beside the result" if "beside" in measured else ""
    print(f"{name:<24}{num_bytes / seconds / 1e9:6.2f} GB/s of {num_bytes / 1e9:.2f} GB{beside}")
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    run_on = {"gpu": gpu, "threads": torch.get_num_threads()}
    append_result("load_weights", {**run_on, "load": name, "bytes": num_bytes, "seconds": seconds, **measured})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the checkpoint (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the weights go")
    args = parser.parse_args()
    size = min(args.gib * 2**30, shutil.disk_usage(args.folder).free / 2)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        paths = [folder / "0.safetensors"]
        write_file(paths[0])
        while (len(paths) + 1) * paths[0].stat().st_size <= size:
            paths.append(folder / f"{len(paths)}.safetensors")
            write_file(paths[-1])
        total = sum(path.stat().st_size for path in paths)
        measure("sequential read", paths, "cpu", lambda: {"read": read_plainly(paths)}, total)
        measure("as stored", paths, args.device, lambda: load(folder, paths, stored_recipes, args.device), total)
        first = paths[:1]
        coded = EXPERTS * (ROWS * COLUMNS * 9 // 16 + 4)
        measure(
            "dequantized to BF16",
            first,
            args.device,
            lambda: load(folder, first, dequantized_recipes, args.device),
            coded,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
