"""What a step takes at least, by the bytes and products of its ops, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from qwen4exp_trt.plugins.cost import Cost, StepSize, sum_costs
from qwen4exp_trt.runtime.bench.cases import DecodeCase, StepKind
from qwen4exp_trt.runtime.bench.rates import Bandwidth
from qwen4exp_trt.runtime.host_memory import total_memory
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.step_costs import floor_seconds, step_cost
from qwen4exp_trt.runtime.target_devices import DEVICES, Device

_MOST_CHUNKS = 16
"""Of a prompt in more of them so many, evenly spread, stand for the others."""


@dataclass(frozen=True)
class Rooflines:
    """The two devices that times are held against."""

    published: Device | None
    """What others measured on GPUs of this architecture; None for one of which nothing is known here."""
    measured: Device
    """What was measured in this run: the faster of a copy and a read, and a product of BF16 matrices."""


@dataclass(frozen=True)
class Floor:
    """Of one step, or of one prompt: what no kernel can save."""

    weight_bytes: int
    state_bytes: int
    flops: int
    published_ms: float | None
    measured_ms: float

    def shares(self, milliseconds: float) -> dict[str, float | None]:
        """How much of a measured time the floors are: 1 is the roofline."""
        published = None if self.published_ms is None else self.published_ms / milliseconds
        return {"published": published, "measured": self.measured_ms / milliseconds}


def make_rooflines(device: torch.device, bandwidth: Bandwidth, matmul_rate: float) -> Rooflines:
    published, name, is_unified, total, num_sms = None, "CPU", True, total_memory(), 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        published = DEVICES.get(f"sm{properties.major}{properties.minor}")
        name, is_unified, total = properties.name, bool(properties.is_integrated), properties.total_memory
        num_sms = properties.multi_processor_count
    measured = Device(
        name=name,
        usable_bytes=total,
        bytes_per_second=max(bandwidth.copy, bandwidth.read),
        matmul_flops=matmul_rate,
        is_unified=is_unified,
        num_sms=num_sms,
    )
    return Rooflines(published, measured)


def decode_floor(model: Program, head: Program | None, case: DecodeCase, rooflines: Rooflines) -> Floor:
    """Of a step. The draft head reads its weights again for each draft, with a row of each sequence."""
    rows = case.batch * case.rows
    costs = [step_cost(model, StepSize(case.batch, rows, case.context, num_logits=rows))]
    if case.kind is StepKind.DRAFT:
        assert head is not None, "a draft head is loaded"
        costs += [step_cost(head, StepSize(case.batch, case.batch, case.context))] * case.drafts
    return _floor(costs, rooflines)


def prefill_floor(model: Program, chunks: Sequence[int], rooflines: Rooflines) -> Floor:
    """Of a prompt in ``chunks``, each of which reads the weights again."""
    starts = list(accumulate(chunks, initial=0))[:-1]
    sizes = [StepSize(1, count, start, num_logits=1) for count, start in zip(chunks, starts, strict=True)]
    return _floor(_costs_of_all(model, sizes), rooflines)


def _costs_of_all(model: Program, sizes: Sequence[StepSize]) -> list[Cost]:
    """Of each size. Many are cut into `_MOST_CHUNKS` neighborhoods, and what the middle of each costs its others do,
    but the last one, which may be short."""
    if len(sizes) <= _MOST_CHUNKS:
        return [step_cost(model, size) for size in sizes]
    *most, last = sizes
    groups: dict[int, list[StepSize]] = {}
    for index, size in enumerate(most):
        groups.setdefault(index * _MOST_CHUNKS // len(most), []).append(size)
    costs = [cost for group in groups.values() for cost in [step_cost(model, group[len(group) // 2])] * len(group)]
    return [*costs, step_cost(model, last)]


def _floor(costs: Iterable[Cost], rooflines: Rooflines) -> Floor:
    """Of runs one after another, each of which is bound by its bytes or its products."""
    runs = list(costs)
    total = sum_costs(runs)

    def milliseconds(device: Device) -> float:
        return 1e3 * sum(floor_seconds(cost, device) for cost in runs)

    return Floor(
        total.weight_bytes,
        total.state_bytes,
        total.flops,
        None if rooflines.published is None else milliseconds(rooflines.published),
        milliseconds(rooflines.measured),
    )
