"""The costs of a step beside what the target can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qwen4exp_trt.builder.inspection.document import CostInfo
from qwen4exp_trt.plugins.cost import Cost, sum_costs
from qwen4exp_trt.runtime.step_costs import floor_seconds
from qwen4exp_trt.runtime.target_devices import Device


class Roofline:
    """The floors of the ops of a part in one step, and their shares of the whole."""

    def __init__(self, costs: Mapping[str, Cost], device: Device | None) -> None:
        self._costs, self._device = costs, device
        self._total = self._weight_of(costs)

    def of_ops(self, paths: Iterable[str]) -> CostInfo:
        """Of the ops ``paths`` together."""
        paths = list(paths)
        cost = sum_costs(self._costs[path] for path in paths)
        seconds = None if self._device is None else self._weight_of(paths)
        share = self._weight_of(paths) / self._total if self._total else 0.0
        return CostInfo(
            weight_bytes=cost.weight_bytes,
            state_bytes=cost.state_bytes,
            activation_bytes=cost.activation_bytes,
            flops=cost.flops,
            seconds=seconds,
            bound=self._bound(paths),
            share=share,
        )

    def of_all(self) -> CostInfo:
        return self.of_ops(self._costs)

    def _weight_of(self, paths: Iterable[str]) -> float:
        """Seconds, or bytes where the target is not known."""
        costs = [self._costs[path] for path in paths]
        if self._device is None:
            return float(sum(cost.memory_bytes for cost in costs))
        return sum(floor_seconds(cost, self._device) for cost in costs)

    def _bound(self, paths: list[str]) -> str:
        """What takes longer in the ops that take longest together."""
        device = self._device
        if device is None or not self._weight_of(paths):
            return "none"
        costs = [self._costs[path] for path in paths]
        in_memory = sum(
            floor_seconds(cost, device)
            for cost in costs
            if cost.memory_bytes / device.bytes_per_second >= cost.flops / device.matmul_flops
        )
        return "memory" if 2 * in_memory >= self._weight_of(paths) else "compute"
