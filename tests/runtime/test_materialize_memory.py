"""Memory beside the result while weights of some 50 MB are made: at most two tensors' worth."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

COLUMNS = 2560
FLOAT_ROWS, CODE_ROWS = 10_000, 20_000
TENSOR_BYTES = 2 * FLOAT_ROWS * COLUMNS
"""Each large tensor has so many: BF16, FP8, or packed FP4 of twice as many elements."""

KINDS = [
    "stack",
    "concat of columns",
    "concat of 128 shards",
    "reshaped concat",
    "fp8 blocks",
    "nvfp4",
    "stack of nvfp4",
]
SCRIPT = """
import ctypes
import json
import sys
from pathlib import Path
import torch
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.specs import Source
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weights import transform

def memory(field):
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(field))

def bfloat16(recipe):
    return transform("cast", recipe, dtype="bfloat16")

bf16, fp8, grid, codes, blocks, scale, shard = map(Source, "bf16 fp8 grid codes blocks scale shard".split())
nvfp4 = transform("dequantize_nvfp4", codes, blocks, scale)
RECIPES = {
    "stack": transform("stack", *[transform("concat", bf16, bf16, dim=0)] * 3),
    "concat of columns": transform("concat", *[bf16] * 3, dim=1),
    "concat of 128 shards": transform("concat", *[shard] * 128, dim=0),
    "reshaped concat": transform("add", transform("cast", transform(
        "reshape", transform("concat", bf16, bf16, dim=0), shape=(-1,)), dtype="float32"), value=1.0),
    "fp8 blocks": bfloat16(transform("dequantize_fp8_blocks", fp8, grid)),
    "nvfp4": bfloat16(nvfp4),
    "stack of nvfp4": bfloat16(transform("stack", nvfp4, nvfp4)),
    "four tensors, then concatenated": None,
}

def memory_beside(kind, reader):
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = memory("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    recipe = RECIPES[kind]
    result = torch.cat(reader.tensors(["bf16"] * 4)) if recipe is None else materialize(recipe, reader)
    return memory("VmHWM:") - before - result.nbytes

with TensorReader(Checkpoint.open(sys.argv[1])) as reader:
    materialize(transform("concat", shard, shard, dim=0), reader)
    print(json.dumps({kind: memory_beside(kind, reader) for kind in RECIPES}))
"""


@pytest.fixture(scope="module")
def memory_beside_results() -> dict[str, int]:
    """Kind of recipe -> bytes at the peak, less those before and those of the result."""
    packed = torch.randint(0, 256, (CODE_ROWS, COLUMNS), dtype=torch.uint8)
    tensors = {
        "bf16": torch.ones(FLOAT_ROWS, COLUMNS, dtype=torch.bfloat16),
        "fp8": (packed & 0x3F).view(torch.float8_e4m3fn),
        "grid": torch.ones(-(-CODE_ROWS // 128), COLUMNS // 128),
        "codes": packed,
        "blocks": torch.ones(CODE_ROWS, COLUMNS // 8).to(torch.float8_e4m3fn),
        "scale": torch.tensor(0.5),
        "shard": torch.ones(1000, COLUMNS, dtype=torch.bfloat16),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors")
        result = subprocess.run([sys.executable, "-c", SCRIPT, folder], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_at_most_two_tensors_are_in_memory_beside_the_result(memory_beside_results: dict[str, int], kind: str) -> None:
    assert memory_beside_results[kind] <= 2 * TENSOR_BYTES


@pytest.mark.slow
def test_the_measurement_notices_parts_that_are_kept(memory_beside_results: dict[str, int]) -> None:
    assert memory_beside_results["four tensors, then concatenated"] > 3.5 * TENSOR_BYTES
