"""Conversion on a GPU gives the files that the CPU gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conversions import plan_conversions_of
from quantized_checkpoints import RELEASES, write_random

from qwen4exp_trt.builder.convert import quantize_weight
from qwen4exp_trt.runtime.tensor_reader import TensorReader

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("release", RELEASES)
def test_a_gpu_gives_the_bits_of_the_cpu(tmp_path: Path, release: str) -> None:
    write_random(tmp_path, RELEASES[release])
    planned = plan_conversions_of(tmp_path, ple="nvfp4")
    with TensorReader(planned.checkpoint) as reader:
        for conversion in planned.conversions:
            on_cpu, on_gpu = (quantize_weight(conversion, reader, device) for device in ("cpu", "cuda"))
            assert on_cpu.keys() == on_gpu.keys()
            for name, tensor in on_cpu.items():
                assert torch.equal(tensor.view(torch.uint8), on_gpu[name].view(torch.uint8)), name
