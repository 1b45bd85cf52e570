"""How many experts the tokens of a step are routed to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.program import Program


class _Routes(fx.Interpreter):
    """Runs a graph and counts the experts that the tokens of each layer are routed to."""

    counts: list[int]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        spec = spec_of(target)
        if spec is not None and spec.name.endswith("moe"):
            operands, attrs = spec.split_args(args)
            scores = operands["x"].float() @ operands["router_weight"].float().T
            self.counts.append(int(scores.topk(attrs["num_experts_per_tok"]).indices.unique().numel()))
        return super().call_function(target, args, kwargs)


def mean_distinct_experts(
    program: Program, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> float:
    """Run a step without padding op by op and count; its states advance."""
    routes = _Routes(program.module)
    routes.counts = []
    program.run(inputs, states, weights, routes.run)
    return sum(routes.counts) / len(routes.counts)
