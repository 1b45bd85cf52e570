"""Weights are read once, into their final place: memory beside them, and page cache behind them, stay bounded."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

MIB = 1 << 20
NUM_TENSORS, TENSOR_BYTES = 12, 16 * MIB
BOUND = 64 * MIB
"""Of a window of what is read and of the pieces that are computed: see `materialize`. All weights take thrice that."""

SCRIPT = """
import ctypes
import json
import mmap
import sys
from pathlib import Path
import torch
from qwen4exp_trt.runtime import piece_batch
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import load_weights
from qwen4exp_trt.runtime.specs import Source, TensorSpec, WeightSpec
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weights import transform

libc = ctypes.CDLL("libc.so.6")
checkpoint = Checkpoint.open(sys.argv[1])
path, page = Path(sys.argv[1]) / "model.safetensors", mmap.PAGESIZE

def memory(field):
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(field))

def cached_bytes():
    private = {"prot": mmap.PROT_READ | mmap.PROT_WRITE, "flags": mmap.MAP_PRIVATE}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, **private) as data:
        pages = (ctypes.c_ubyte * -(-len(data) // page))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(data)), pages) == 0
        return page * sum(entry & 1 for entry in pages)

def load(make):
    specs = []
    for name in checkpoint.names:
        shape = tuple(checkpoint.shape(name))
        specs.append(WeightSpec(TensorSpec(name, *make(shape)[:2]), make(shape)[2](Source(name))))
    libc.malloc_trim(0)
    before = memory("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    with TensorReader(checkpoint) as reader:
        weights = load_weights(specs, reader)
    return memory("VmHWM:") - before - sum(weight.nbytes for weight in weights.values())

as_it_is = lambda shape: (shape, "bfloat16", lambda source: source)
cast = lambda shape: (shape, "float8_e4m3fn", lambda source: transform("cast", source, dtype="float8_e4m3fn"))
load(as_it_is)
found = {"as they are": load(as_it_is), "cast": load(cast)}
piece_batch._Leaf.is_at_home_in = lambda leaf, target: False  # as for a GPU, whose memory no file is read into
found["by way of staging"] = load(as_it_is)
found["cached"] = cached_bytes()
path.read_bytes()
found["cached if read otherwise"] = cached_bytes()
piece_batch.Staging.give_back = lambda staging, memory: kept.append(memory)
kept = []
found["if what was read were kept"] = load(as_it_is)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    """Bytes beside the weights at the peak of loading, and of their file in the page cache."""
    tensors = {f"w{i}": torch.ones(TENSOR_BYTES // 2 // 2048, 2048, dtype=torch.bfloat16) for i in range(NUM_TENSORS)}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # on a disk: a tmpfs is nothing but cache
        save_file(tensors, Path(folder) / "model.safetensors")
        result = subprocess.run([sys.executable, "-c", SCRIPT, folder], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("how", ["as they are", "cast", "by way of staging"])
def test_memory_beside_the_weights_is_bounded(found: dict[str, int], how: str) -> None:
    assert found[how] <= BOUND


def test_nothing_that_was_read_stays_in_the_page_cache(found: dict[str, int]) -> None:
    assert found["cached"] <= MIB


def test_the_measurements_notice_what_stays(found: dict[str, int]) -> None:
    assert found["if what was read were kept"] > 2 * BOUND
    assert found["cached if read otherwise"] == pytest.approx(NUM_TENSORS * TENSOR_BYTES, rel=0.1)
