"""The table of what became what: the weights of each component by the formats that they had and have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qwen4exp_trt.builder.policy import Choice
from qwen4exp_trt.builder.weight_bytes import Component, component_of
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.runtime.weight_formats import WeightFormat

_NAME_WIDTH = 22


@dataclass(frozen=True)
class WeightTableRow:
    """Weights of one component that share their fate; all fields are words for people, or counts."""

    component: str
    stored: str
    """The format in the checkpoint, or several; ``held`` where both are float."""
    held: str
    """The format in the bundle: that of the activations for a weight that is not quantized."""
    num_weights: int
    num_elements: int
    remark: str
    """``converted`` if it is in a file beside the bundle, ``dequantized``, or why it is not what was asked for."""


def weight_table(config: ModelConfig, choices: Sequence[Choice], activation_dtype: str) -> list[WeightTableRow]:
    """One row for each component and fate, in the order of `Component`."""
    shapes = expected_weights(config)
    sums: dict[tuple[Component, str, str, str], list[int]] = {}
    for choice in choices:
        held = activation_dtype if choice.format is WeightFormat.FLOAT else choice.format.value
        is_float = choice.stored == (choice.format,) == (WeightFormat.FLOAT,)
        stored = held if is_float else " and ".join(choice.stored)
        key = (component_of(choice.name), stored, held, _remark(choice))
        total = sums.setdefault(key, [0, 0])
        total[0] += 1
        total[1] += math.prod(shapes[choice.name])
    order = list(Component)
    return [
        WeightTableRow(component.value, stored, held, count, elements, remark)
        for (component, stored, held, remark), (count, elements) in sorted(
            sums.items(), key=lambda item: order.index(item[0][0])
        )
    ]


def _remark(choice: Choice) -> str:
    fate = "converted" if choice.is_converted else ""
    if choice.format is WeightFormat.FLOAT and choice.stored != (WeightFormat.FLOAT,):
        fate = "dequantized"
    activations = "NVFP4 activations" if choice.has_nvfp4_activations else ""
    return ", ".join(filter(None, (": ".join(filter(None, (fate, choice.reason))), activations)))


def format_weight_table(rows: Sequence[WeightTableRow]) -> str:
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[WeightTableRow]) -> Iterator[str]:
    yield f"{'weights':<{_NAME_WIDTH}}  {'count':>6}  {'elements':>12}  in the checkpoint -> in the bundle"
    for row in rows:
        change = row.held if row.stored == row.held else f"{row.stored} -> {row.held}"
        remark = f" ({row.remark})" if row.remark else ""
        elements = f"{row.num_elements / 1e6:,.2f} M"
        yield f"  {row.component:<{_NAME_WIDTH - 2}}  {row.num_weights:>6}  {elements:>12}  {change}{remark}"
