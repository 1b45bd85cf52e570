"""The released model in one precision with random weights, served from the GPU at hand: what full-size runs share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from full_size_program import make_program
from torch import Tensor

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.plugins.compile import architecture
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.bench.filled_states import FilledCache
from qwen4exp_trt.runtime.bench.random_weights import RandomWeights
from qwen4exp_trt.runtime.drafts.drafting import Drafting
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.program_text import load_program
from qwen4exp_trt.runtime.state_pool import allocate_states

PRECISIONS = ("nvfp4", "checkpoint")
PLE = "nvfp4"
"""The format of the n-gram table: so all of it fits an H200 beside experts in NVFP4 and everything else in BF16."""


def make_programs(config_file: Path, precisions: Sequence[str], limits: EngineLimits, root: Path) -> dict[str, Path]:
    """The program of each precision in a folder below ``root``, its kernels compiled for the GPU at hand."""
    start, folders = time.perf_counter(), {precision: root / precision for precision in precisions}
    arch = architecture(torch.cuda.get_device_capability())
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(make_program, config_file, precision, PLE, limits, folder, arch, num_sms)
            for precision, folder in folders.items()
        ]
        num_kernels = [job.result() for job in jobs]
    print(f"programs and {num_kernels} kernels: {time.perf_counter() - start:.1f} s", flush=True)
    return folders


class FullSizeModel:
    """States for ``num_blocks`` pages, and random weights. ``core`` serves requests within ``limits``."""

    def __init__(
        self, config: ModelConfig, precision: str, folder: Path, limits: EngineLimits, num_blocks: int
    ) -> None:
        start = time.perf_counter()
        self.config, self.precision, self.limits, self.num_blocks = config, precision, limits, num_blocks
        self.program, device = load_program(folder), torch.device("cuda", torch.cuda.current_device())
        states = allocate_states(self.program.states, num_blocks, limits.num_slots, device)
        weights = RandomWeights().make_weights(self.program.weights, device)
        self.backend = EagerBackend(self.program, states, weights, limits, device)
        self.core = self.core_within(limits)
        torch.cuda.synchronize()
        num_bytes = sum(weight.nbytes for weight in weights.values())
        seconds = time.perf_counter() - start
        print(f"{precision}: {num_bytes / 2**30:.1f} GiB of weights, made in {seconds:.1f} s", flush=True)

    def core_within(self, limits: EngineLimits, context: int = 0, drafting: Drafting | None = None) -> EngineCore:
        """Serves this model with other limits, and from ``context`` tokens on whose states are whatever is there."""
        return EngineCore(
            self.backend,
            limits,
            self.num_blocks,
            self.config.vocab_size,
            (),
            None,
            prefix_cache=(lambda states: FilledCache(states, context)) if context else None,
            drafting=drafting,
        )

    def random_prompt(self, num_tokens: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.config.vocab_size, (num_tokens,), generator=generator)
