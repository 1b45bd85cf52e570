"""How a bundle is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.ngram_table import NgramTable
from qwen4exp_trt.runtime.prefix_cache.options import PrefixCacheOptions
from qwen4exp_trt.runtime.progress_line import Progress
from qwen4exp_trt.runtime.specs import PleResidency, TensorSpec, WeightSpec

DEFAULT_ROW_CACHE_BYTES = 64 * 2**20
"""Of rows of an n-gram table on disk that are kept, for each table: 180,000 of the released model's."""


class WeightMaker(Protocol):
    """Makes what is otherwise read from the files of a checkpoint."""

    def make_weights(
        self,
        specs: Sequence[WeightSpec],
        device: torch.device,
        host_weights: Collection[str] = (),
        progress: Progress | None = None,
    ) -> dict[str, Tensor]:
        """Every weight by name, as `load_weights` gives it."""
        ...

    def make_ngram_table(self, inputs: Sequence[TensorSpec], residency: PleResidency) -> NgramTable:
        """What completes ``inputs`` of the program, which are those of a table that stays on disk, if there are any."""
        ...


class CudaGraphs(StrEnum):
    """Who makes CUDA graphs of decode steps."""

    OWN = "own"
    """This runtime: one graph holds the step and its sampling (`DecodeGraphs`)."""
    TENSORRT = "tensorrt"
    """TensorRT for RTX, of the engine alone."""
    NONE = "none"
    """Nobody: every step is enqueued kernel by kernel."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a bundle's user decides about its memory and its files."""

    checkpoint: Path | None = None
    """Where the checkpoint is now; None for where it was at the build."""
    weight_maker: WeightMaker | None = None
    """What makes the weights; None for reading those of the checkpoint."""
    num_blocks: int | None = None
    """Pages of the KV cache; None for a full batch of the longest sequences, or as many as there is memory for."""
    with_draft_head: bool = False
    """Whether the bundle's draft head is loaded; it must have one."""
    row_cache_bytes: int = DEFAULT_ROW_CACHE_BYTES
    """Memory for rows of an n-gram table that stays on disk."""
    memory_reserve_bytes: int | None = None
    """Of the host's memory, what is left to the rest of the system; None for `default_reserve`."""
    prefix_cache: PrefixCacheOptions | None = None
    """What the caller keeps of states beside the backend; None for nothing."""
    other_uses: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the caller takes besides, by what for."""
    debug_nan: bool = False
    """Whether steps are watched for results that are not finite (`NanTrace`)."""
    cuda_graphs: CudaGraphs | str | None = None
    """Who makes CUDA graphs of decode steps; None for `CudaGraphs.OWN` on a GPU, and none on a CPU."""
    jit_cache: str | Path = "user"
    """Where what TensorRT for RTX compiles is kept: ``user``, ``bundle``, ``none``, or a folder."""
    progress: Progress | None = None
    """Is called with the bytes of weights that are loaded, and the bytes of all."""

    def graphs_on(self, device_type: str) -> CudaGraphs:
        """What ``cuda_graphs`` means on a device of that type."""
        if self.cuda_graphs is None:
            return CudaGraphs.NONE if device_type == "cpu" else CudaGraphs.OWN
        return CudaGraphs(self.cuda_graphs)

    def __post_init__(self) -> None:
        if self.num_blocks is not None and (not isinstance(self.num_blocks, int) or self.num_blocks < 1):
            raise BundleError(f"num_blocks is {self.num_blocks!r}; the KV cache needs at least one page")
        if self.cuda_graphs is not None and self.cuda_graphs not in list(CudaGraphs):
            raise BundleError(f"cuda_graphs is {self.cuda_graphs!r}; it must be one of {', '.join(CudaGraphs)}")
        if not isinstance(self.jit_cache, str | Path) or not str(self.jit_cache):
            raise BundleError(f"jit_cache is {self.jit_cache!r}; it must be 'user', 'bundle', 'none' or a folder")
        for name in ("row_cache_bytes", "memory_reserve_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise BundleError(f"{name} is {value!r}; it must be a number of bytes, 0 or more")
