"""An inspection as text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from qwen4exp_trt.builder.inspection.document import (
    CostInfo,
    Engine,
    EngineLayer,
    Inspection,
    Op,
    Part,
    Profile,
    State,
    Value,
    Weight,
)
from qwen4exp_trt.builder.inspection.folding import Fold, fold, without_layer
from qwen4exp_trt.builder.plan_report import size, traffic, work
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS

T = TypeVar("T")

_LABEL_WIDTH = 12
_SHORT = {"bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "e4m3", "float4_e2m1fn": "e2m1"}
_MOST_SOURCES = 2


def format_inspection(inspection: Inspection, fold_layers: bool = True, pattern: str = "*") -> str:
    """All of it; with a ``pattern`` the ops, states and weights whose names match it.

    Layers of the same kind are folded into one row unless ``fold_layers`` is False.
    """
    lines = list(_header(inspection))
    for part in inspection.parts:
        lines += ["", *_PartText(part, list(inspection.profiles), fold_layers, pattern).lines()]
    return "\n".join(line.rstrip() for line in (*lines, *(f"warning: {text}" for text in inspection.warnings)))


def _header(inspection: Inspection) -> Iterator[str]:
    options, limits, target = inspection.options, inspection.limits, inspection.target
    yield _labelled("bundle", inspection.bundle)
    yield _labelled("made by", ", ".join(f"{name} {version}" for name, version in inspection.versions.items()))
    yield _labelled(
        "options",
        f"precision {options['precision']}, n-gram table {options['ple_precision']} on {options['ple_residency']}, "
        f"activations {options['activation_dtype']}, KV cache {options['kv_cache_dtype']}",
    )
    if target is None:
        yield _labelled("target", "none: a bundle without an engine")
    elif target.bytes_per_second is None or target.matmul_flops is None:
        yield _labelled("target", f"{target.architecture}, whose memory and rate are not known: no floors")
    else:
        yield _labelled(
            "target",
            f"{target.architecture} ({target.name}): at most {target.bytes_per_second / 1e9:.0f} GB/s and "
            f"{target.matmul_flops / 1e12:.0f} TFLOP/s in BF16, as others measured",
        )
    yield _labelled(
        "limits",
        f"{limits['max_batch_size']} sequences of {limits['max_seq_len']:,} tokens, "
        f"chunks of {limits['prefill_chunk']:,}, pages of {limits['block_size']}",
    )
    for name, profile in inspection.profiles.items():
        yield _labelled(name, _describe_profile(profile))
    pools = next(iter(inspection.profiles.values())).dims  # as in all profiles
    yield _labelled("pools", _ranges(pools, (NUM_BLOCKS, NUM_SLOTS)))


def _describe_profile(profile: Profile) -> str:
    step = profile.step
    sequences = "1 sequence" if step.num_seqs == 1 else f"{step.num_seqs} sequences"
    tokens = "1 new token" if step.num_tokens == 1 else f"{step.num_tokens:,} new tokens"
    return f"{tokens} of {sequences} behind {step.context_len:,}; {_ranges(profile.dims, ('T', 'L'))}"


def _ranges(dims: dict[str, list[int]], names: Iterable[str]) -> str:
    return ", ".join("{} {}..{}, typically {}".format(name, *(dims[name][i] for i in (0, 2, 1))) for name in names)


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}  {text}"


class _PartText:
    def __init__(self, part: Part, profiles: list[str], fold_layers: bool, pattern: str) -> None:
        self._part, self._profiles = part, profiles
        self._fold_layers, self._pattern = fold_layers, pattern
        self._layers = part.engine.layers if part.engine else []

    def lines(self) -> Iterator[str]:
        yield from self._summary()
        for lines in (self._components(), self._ops(), self._states(), self._weights()):
            header, *rows = lines
            if rows:
                yield from ("", header, *rows)

    def _summary(self) -> Iterator[str]:
        part, engine = self._part, self._part.engine
        yield _labelled(part.name, f"{len(part.ops)} ops, {len(part.states)} states, {len(part.weights)} weights")
        if engine is None:
            yield _labelled("engine", "none")
        else:
            counts = ", ".join(f"{len(self._of_profile(name))} layers in {name}" for name in self._profiles)
            memory = ", ".join(
                f"{size(num_bytes)} in {name} ({size(engine.scratch_bytes.get(name, 0))} of it scratch)"
                for name, num_bytes in engine.activation_bytes.items()
            )
            yield _labelled("engine", f"{size(engine.num_bytes)} by {engine.tensorrt} for {engine.target}: {counts}")
            yield _labelled("activations", memory or "not told")
            if part.debug_outputs:
                yield _labelled("", f"{len(part.debug_outputs)} values are outputs too, for debugging")
            yield from _merged(engine)
        for profile in self._profiles:
            total = part.totals[profile]
            yield _labelled(profile, describe_total(total))

    def _of_profile(self, profile: str) -> list[EngineLayer]:
        return [layer for layer in self._layers if layer.profile == profile]

    def _components(self) -> Iterator[str]:
        header = ["component", "ops", "resident", *self._cost_header()]
        rows = [
            [each.name, str(each.num_ops), size(each.weight_bytes), *self._costs([each.costs])]
            for each in self._part.components
        ]
        yield from table([header, *rows], left=1)

    def _ops(self) -> Iterator[str]:
        ops = [op for op in self._part.ops if self._matches(op.path)]
        rows, notes = [["op", "", *self._cost_header()]], [""]
        for group in self._folded(ops, lambda op: op.path, self._op_key):
            op = group.first
            rows.append([group.label, op.op.partition(".")[2], *self._costs([each.costs for each in group.items])])
            notes.append(f"{op.kind}{self._made_of(op)}: {self._types(op)}")
        for line, note in zip(table(rows, left=2), notes, strict=True):
            yield line
            if note:
                yield f"    {note}"

    def _op_key(self, op: Op) -> Hashable:
        costs = tuple((cost.weight_bytes, cost.state_bytes, cost.flops) for cost in op.costs.values())
        return op.op, self._types(op), self._made_of(op), costs

    def _made_of(self, op: Op) -> str:
        """The types of the engine layers; of both profiles if they differ."""
        if not op.engine_layers:
            return ", no engine layer" if self._layers and op.kind != "view" else ""
        kinds = {profile: layer_types(self._layers, op, profile) for profile in self._profiles}
        if len(set(kinds.values())) == 1:
            return f", {next(iter(kinds.values()))}"
        return "".join(f", {kind} in {profile}" for profile, kind in kinds.items())

    def _types(self, op: Op) -> str:
        """Of operands but the metadata of the batch, which is of integers, and of results."""
        operands = [self._part.values[name] for name in op.inputs]
        shown = [value for value in operands if value.kind != "input" or not value.dtype.startswith("int")]
        return f"{_tensors(shown)} -> {_tensors(self._part.values[name] for name in op.outputs)}"

    def _states(self) -> Iterator[str]:
        states = [state for state in self._part.states if self._matches(state.name)]

        def key(state: State) -> Hashable:
            return state.kind, state.dtype, tuple(state.shape)

        rows = [["state", "dtype", "shape", "a page or slot", "a sequence", "updated by"]]
        for group in self._folded(states, lambda state: state.name, key):
            state, count = group.first, len(group.items)
            num_bytes = sum(each.sequence_bytes for each in group.items)
            shape = _shape(state.shape)
            row = [group.label, state.dtype, shape, size(state.row_bytes), size(num_bytes), _op_name(state.updated_by)]
            rows.append(row if count == 1 else [*row[:3], f"{size(state.row_bytes)} each", *row[4:]])
        yield from table(rows, left=3, last_left=True)

    def _weights(self) -> Iterator[str]:
        weights = [weight for weight in self._part.weights if self._matches(weight.name)]

        def key(weight: Weight) -> Hashable:
            return weight.dtype, tuple(weight.shape), tuple(weight.transforms), len(weight.sources)

        rows = [["weight", "dtype", "shape", "bytes", "of the checkpoint's"]]
        for group in self._folded(weights, lambda weight: weight.name, key):
            weight = group.first
            num_bytes = sum(each.num_bytes for each in group.items)
            rows.append([group.label, weight.dtype, _shape(weight.shape), size(num_bytes), _describe_sources(group)])
        yield from table(rows, left=3, last_left=True)

    def _matches(self, name: str) -> bool:
        return fnmatchcase(name, self._pattern)

    def _folded(
        self, items: Sequence[T], name_of: Callable[[T], str], key_of: Callable[[T], Hashable]
    ) -> list[Fold[T]]:
        if self._fold_layers:
            return fold(items, name_of, key_of)
        return [Fold(name_of(item), [item]) for item in items]

    def _cost_header(self) -> list[str]:
        return [title for profile in self._profiles for title in (f"{profile}: bytes", "FLOPs", "share")]

    def _costs(self, costs: Sequence[dict[str, CostInfo]]) -> list[str]:
        cells: list[str] = []
        for profile in self._profiles:
            of_profile = [each[profile] for each in costs]
            num_bytes = sum(each.weight_bytes + each.state_bytes for each in of_profile)
            flops = sum(each.flops for each in of_profile)
            share = f"{sum(each.share for each in of_profile):.1%}"
            cells += [traffic(num_bytes) if num_bytes else "", work(flops) if flops else "", share]
        return cells


def _merged(engine: Engine) -> Iterator[str]:
    """With ``--engine``: which layers only one side has."""
    told = sum(layer.inspector is not None for layer in engine.layers)
    if not told and not engine.only_inspector:
        return
    yield _labelled("inspector", f"{told} of {len(engine.layers)} layers are in the loaded engine by the same name")
    for name in engine.only_report:
        yield _labelled("", f"only in the builder's report: {name}")
    for layer in engine.only_inspector:
        yield _labelled("", f"only in the loaded engine: {layer.get('Name')} ({layer.get('LayerType', 'no type')})")


def describe_total(total: CostInfo) -> str:
    """The cost of a step, in words."""
    moved = f"{traffic(total.weight_bytes)} of weights and {traffic(total.state_bytes)} of states"
    text = f"{moved}, {work(total.flops)}, {traffic(total.activation_bytes)} of operands and results"
    return text if total.seconds is None else f"at least {_time(total.seconds)}: {text}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.2f} us"


def layer_types(layers: Sequence[EngineLayer], op: Op, profile: str) -> str:
    """The types of the engine layers that compute ``op``, and with how many other ops each is fused."""
    types: list[str] = []
    for layer in (layers[index] for index in op.engine_layers.get(profile, [])):
        types.append(f"{layer.type} of {len(layer.ops)} ops" if len(layer.ops) > 1 else layer.type)
    return " + ".join(types) or "none"


def describe_value(value: Value) -> str:
    """``bf16[T, 2560]``."""
    return f"{_SHORT.get(value.dtype, value.dtype)}{_shape(value.shape)}"


def _tensors(values: Iterable[Value]) -> str:
    return ", ".join(map(describe_value, values))


def _shape(shape: Iterable[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _op_name(path: str) -> str:
    return path.rpartition(".")[2]


def _describe_sources(group: Fold[Weight]) -> str:
    weight = group.first
    if not weight.sources:
        return "constant"
    shown = [without_layer(name) if len(group.items) > 1 else name for name in weight.sources]
    more = f" and {len(shown) - _MOST_SOURCES} more" if len(shown) > _MOST_SOURCES else ""
    through = f" ({', '.join(weight.transforms)})" if weight.transforms else ""
    return f"{', '.join(shown[:_MOST_SOURCES])}{more}{through}"


def table(rows: Sequence[Sequence[str]], left: int, last_left: bool = False) -> list[str]:
    """Rows of cells in columns, the first ``left`` of them, and the last if asked, aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def is_left(column: int) -> bool:
        return column < left or (last_left and column == len(widths) - 1)

    return [
        "  ".join(
            f"{cell:<{width}}" if is_left(column) else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
