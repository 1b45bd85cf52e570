"""Random weights, for a bundle whose checkpoint is not there: sizes and traffic of real ones, no meaning."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.runtime.aligned_memory import aligned_empty
from qwen4exp_trt.runtime.host_memory import map_into_gpu
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.ngram_table import NgramTable, ResidentTable
from qwen4exp_trt.runtime.progress_line import Progress
from qwen4exp_trt.runtime.specs import Literal, NgramRowsSpec, PleResidency, TensorSpec, WeightSpec, extent_of
from qwen4exp_trt.runtime.weights import dtype_from_name

_NVFP4_SCALE = 0.0075
"""With random codes and block scales from 1/4 to 2, a standard deviation of about 1 / sqrt(2560)."""
_ROWS_STD = 0.02
"""Of what a table on disk would give."""
_NUM_ROWS = 4093
"""Different rows of a token; a prime, and so are the factors that choose one by a token's id and position."""
_ID_FACTOR, _POSITION_FACTOR = 7919, 1009


class RandomWeights:
    """Makes weights with which activations stay finite and spread: products of unit variance, gains of one. The same
    ``seed`` gives the same on one kind of device. Where `LoadOptions` asks for what makes the weights."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def make_weights(
        self,
        specs: Sequence[WeightSpec],
        device: torch.device,
        host_weights: Collection[str] = (),
        progress: Progress | None = None,
    ) -> dict[str, Tensor]:
        """Of each of ``specs`` by name, on ``device``, or for a GPU to read from the host's memory."""
        total, done, weights = sum(spec.tensor.num_bytes({}) for spec in specs), 0, {}
        generators = {place: torch.Generator(place).manual_seed(self.seed) for place in {device, torch.device("cpu")}}
        for spec in specs:
            is_on_host = spec.name in host_weights
            weight = _random_weight(spec, generators[torch.device("cpu") if is_on_host else device])
            mapped = is_on_host and device.type == "cuda"
            weights[spec.name] = map_into_gpu(weight, spec.name) if mapped else weight
            done += spec.tensor.num_bytes({})
            if progress is not None:
                progress(done, total)
        return weights

    def make_ngram_table(self, inputs: Sequence[TensorSpec], residency: PleResidency) -> NgramTable:
        """What gives ``inputs`` the rows of a table: random ones where it would be read from a disk."""
        specs = [spec for spec in inputs if isinstance(spec, NgramRowsSpec)]
        return _RandomRows(specs, self.seed) if specs else ResidentTable(residency)


class _RandomRows(ResidentTable):
    """Random rows in place of those of a table on a disk. Nothing is read, and a token has the same rows in every step
    that runs it at its position, so that two executions of a step can be compared."""

    def __init__(self, specs: Sequence[NgramRowsSpec], seed: int) -> None:
        super().__init__(PleResidency.DISK)
        generator = torch.Generator().manual_seed(seed)
        self._pools = {spec.name: _random_rows(spec, generator) for spec in specs}

    @property
    def info(self) -> Mapping[str, Any]:
        return {"residency": str(self.residency), "rows": "random, nothing is read from a disk"}

    def complete(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        ids, positions = inputs["input_ids"].long(), inputs["positions"][0].long()
        chosen = (ids * _ID_FACTOR + positions * _POSITION_FACTOR) % _NUM_ROWS
        return {**inputs, **{name: pool[chosen] for name, pool in self._pools.items()}}


def _random_rows(spec: NgramRowsSpec, generator: torch.Generator) -> Tensor:
    shape = [_NUM_ROWS, *(extent_of(dim, {}) for dim in spec.shape[1:])]
    return torch.empty(shape).normal_(std=_ROWS_STD, generator=generator).to(dtype_from_name(spec.dtype))


def _random_weight(spec: WeightSpec, generator: torch.Generator) -> Tensor:
    device, name = generator.device, spec.name
    if isinstance(spec.recipe, Literal):
        return materialize(spec.recipe, {}.__getitem__, device)
    dtype = dtype_from_name(spec.tensor.dtype)
    weight = aligned_empty([extent_of(dim, {}) for dim in spec.tensor.shape], dtype, device)
    if dtype == torch.float4_e2m1fn_x2:
        weight.view(torch.uint8).random_(generator=generator)
    elif dtype == torch.float8_e4m3fn and "block_scales" in name:
        weight.view(torch.uint8).random_(0x28, 0x40, generator=generator)  # 1/4 to 2
    elif dtype == torch.float8_e4m3fn:
        fill_e4m3(weight, generator)
    elif "scales" in name:
        weight.fill_(_NVFP4_SCALE)
    elif name.endswith("A_log"):
        weight.uniform_(1, 16, generator=generator).log_()
    elif name.endswith("linear_attn.norm.weight") or (dtype == torch.float32 and weight.ndim < 2):
        weight.fill_(1)  # gains of norms
    elif name.endswith("embed_tokens.weight") or weight.ndim == 1:
        weight.normal_(generator=generator)
    else:
        weight.normal_(std=1 / math.sqrt(weight.shape[-1]), generator=generator)
    return weight


def fill_e4m3(target: Tensor, generator: torch.Generator) -> None:
    """Random values below one: without the highest bit of the exponent, and so without NaN."""
    target.view(torch.uint8).random_(generator=generator).bitwise_and_(0xB7)
