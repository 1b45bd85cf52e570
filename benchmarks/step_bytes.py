"""The bytes that a decode step has to move: what no kernel can save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from qwen4exp_trt.builder.plan import PlanRequest, make_plan
from qwen4exp_trt.builder.weight_bytes import Component, weight_groups
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.program import Program


@dataclass(frozen=True)
class StepBytes:
    """Read and written bytes of one step, each counted once."""

    weights: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.states


def step_bytes(request: PlanRequest, num_seqs: int, num_tokens: int, distinct_experts: float) -> StepBytes:
    """Of a step of ``num_seqs`` sequences at the longest context of ``request`` with ``num_tokens`` new ones in all.

    ``distinct_experts``: how many routed experts a layer uses in the step, on average. A row of a table is read for
    each token, every other weight once.
    """
    config, weights = request.config, 0
    formats = request.choose_formats(request.precision, request.ple)
    for group in weight_groups(config, formats, request.activation_dtype):
        if group.component.is_of_draft_head:
            continue
        if group.component is Component.EXPERTS:
            weights += int(group.num_bytes * distinct_experts / config.num_experts)
        elif group.component in (Component.NGRAM_TABLE, Component.EMBED_TOKENS):
            weights += num_tokens * group.read_bytes
        else:
            weights += group.read_bytes
    return StepBytes(weights, num_seqs * sum(use.token_bytes for use in make_plan(request).states.values()))


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
