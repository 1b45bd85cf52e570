"""How two bundles differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qwen4exp_trt.builder.inspection.document import Inspection, Op, Part, State, Weight
from qwen4exp_trt.builder.inspection.folding import fold
from qwen4exp_trt.builder.inspection.text import describe_total, describe_value, layer_types, table
from qwen4exp_trt.builder.plan_report import size, traffic, work

ABSENT = "-"


@dataclass(frozen=True)
class Difference:
    """One fact that two bundles do not share."""

    section: str
    """``options``, ``passes``, ``ops`` ... and the part of the bundle."""
    name: str
    this: str
    """`ABSENT` for what only the other has."""
    other: str


def list_differences(this: Inspection, other: Inspection, pattern: str = "*") -> list[Difference]:
    """What differs; of ops, weights and states only those whose names match ``pattern``.

    Versions, times and places are no difference.
    """
    found = [*_compare("options", this.options, other.options), *_compare("limits", this.limits, other.limits)]
    found += _compare("ops", this.plugins, other.plugins)
    ours, theirs = ({part.name: part for part in each.parts} for each in (this, other))
    for name in dict.fromkeys([*ours, *theirs]):
        if name in ours and name in theirs:
            found += _compare_parts(ours[name], theirs[name], pattern)
        else:
            found += _compare("parts", *({name: "there"} if name in each else {} for each in (ours, theirs)))
    return found


def format_differences(differences: Sequence[Difference]) -> str:
    """A table a section; what differs alike in several layers is one row."""
    if not differences:
        return "no difference"
    lines: list[str] = []
    for section in dict.fromkeys(difference.section for difference in differences):
        members = [difference for difference in differences if difference.section == section]
        folded = fold(members, lambda each: each.name, lambda each: (each.this, each.other))
        rows = [[group.label, group.first.this, group.first.other] for group in folded]
        lines += ["", *table([[section, "this", "other"], *rows], left=3)]
    return "\n".join(line.rstrip() for line in lines[1:])


def _compare(section: str, this: Mapping[str, object], other: Mapping[str, object]) -> Iterator[Difference]:
    for name in dict.fromkeys([*this, *other]):
        ours, theirs = (str(each[name]) if name in each else ABSENT for each in (this, other))
        if ours != theirs:
            yield Difference(section, name, ours, theirs)


def _compare_parts(this: Part, other: Part, pattern: str) -> Iterator[Difference]:
    def compare(section: str, describe: Callable[[Part], Mapping[str, object]]) -> Iterator[Difference]:
        return _compare(f"{this.name}: {section}", describe(this), describe(other))

    yield from compare("passes", lambda part: {each["name"]: f"{each['rewrites']} rewrites" for each in part.passes})
    yield from compare("outputs for debugging", lambda part: dict.fromkeys(part.debug_outputs, "there"))
    yield from compare("a step", lambda part: {name: describe_total(total) for name, total in part.totals.items()})
    yield from compare("engine", _engine_facts)
    yield from _compare_ops(this, other, pattern)
    for section, describe in (("states", _state_facts), ("weights", _weight_facts)):
        yield from (each for each in compare(section, describe) if fnmatchcase(each.name, pattern))


def _engine_facts(part: Part) -> dict[str, str]:
    if part.engine is None:
        return {}
    facts = {"size": size(part.engine.num_bytes), "TensorRT": part.engine.tensorrt, "target": part.engine.target}
    facts |= {f"activations in {name}": size(count) for name, count in part.engine.activation_bytes.items()}
    profiles = dict.fromkeys(layer.profile for layer in part.engine.layers)
    counts = {name: sum(layer.profile == name for layer in part.engine.layers) for name in profiles}
    return facts | {f"layers in {name}": str(count) for name, count in counts.items()}


def _state_facts(part: Part) -> dict[str, str]:
    def describe(state: State) -> str:
        return f"{state.dtype}[{', '.join(map(str, state.shape))}], {size(state.sequence_bytes)} a sequence"

    return {state.name: describe(state) for state in part.states}


def _weight_facts(part: Part) -> dict[str, str]:
    def describe(weight: Weight) -> str:
        return f"{weight.dtype}[{', '.join(map(str, weight.shape))}], {size(weight.num_bytes)}"

    return {weight.name: describe(weight) for weight in part.weights}


def _compare_ops(this: Part, other: Part, pattern: str) -> Iterator[Difference]:
    ours, theirs = ({op.path: op for op in part.ops if fnmatchcase(op.path, pattern)} for part in (this, other))
    renamed = _renamed(ours.keys() - theirs.keys(), theirs.keys() - ours.keys())
    named_alike = {renamed.get(path, path): path for path in ours}
    pairs = [(path, op, theirs.get(renamed.get(path, path))) for path, op in ours.items()]
    pairs += [(path, None, op) for path, op in theirs.items() if path not in named_alike]
    for path, *both in pairs:
        facts = [_facts_of_op(part, op) for part, op in zip((this, other), both, strict=True)]
        sections = dict.fromkeys(section for each in facts for section in each)
        for section in sections if None not in both else ["ops"]:
            our, their = (each.get(section, (None, ABSENT)) for each in facts)
            if our != their:
                yield Difference(f"{this.name}: {section}", path, our[1], their[1])


def _facts_of_op(part: Part, op: Op | None) -> dict[str, tuple[object, str]]:
    """What the op is, what it gives, what it is in the engine, and what it costs: to compare and to show."""
    if op is None:
        return {}
    results = ", ".join(describe_value(part.values[name]) for name in op.outputs)
    described = f"{op.op} ({op.kind}) -> {results}"
    facts: dict[str, tuple[object, str]] = {"ops": (described, described)}
    for profile, cost in op.costs.items():
        if part.engine is not None:
            types = layer_types(part.engine.layers, op, profile)
            facts[f"engine layers in {profile}"] = (types, types)
        num_bytes = cost.weight_bytes + cost.state_bytes
        facts[f"ops in {profile}"] = ((num_bytes, cost.flops), f"{traffic(num_bytes)}, {work(cost.flops)}")
    return facts


def _renamed(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """Ops that are named after what they do: the only one of a module on each side is the same."""
    modules: dict[str, tuple[list[str], list[str]]] = {}
    for side, paths in enumerate((ours, theirs)):
        for path in paths:
            modules.setdefault(path.rpartition(".")[0], ([], []))[side].append(path)
    return {a[0]: b[0] for a, b in modules.values() if len(a) == len(b) == 1}
