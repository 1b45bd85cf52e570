"""The plan of a build in words. Memory is in binary units, what a token reads and writes in decimal ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qwen4exp_trt.builder.plan import RESERVE_BYTES, Plan

_NAME_WIDTH = 22
_SIZE_WIDTH = 14


def format_plan(plan: Plan) -> str:
    """The table that precedes a build, and that ``--plan`` prints."""
    return "\n".join([*_head(plan), *_weight_lines(plan), *_state_lines(plan), *_memory_lines(plan), *_tail(plan)])


def describe_total(plan: Plan) -> str:
    """The memory in all, and whether the target has as much."""
    return ", ".join(filter(None, (size(plan.total_bytes), _verdict(plan))))


def describe_misfit(plan: Plan) -> str | None:
    """What exceeds the target's memory and what would fit; None for a plan that fits or an unknown target."""
    if plan.device is None or not plan.missing_bytes:
        return None
    options = " or ".join(f"--{name.replace('_', '-')} {value}" for name, value in plan.fitting_limits.items())
    advice = f"it fits with {options}" if options else "with these weights no context and no batch size fits"
    return (
        f"{plan.precision} needs {size(plan.total_bytes)} ({size(plan.weight_bytes)} of it weights), "
        f"{size(plan.missing_bytes)} more than the {size(plan.device.usable_bytes)} that are usable on a "
        f"{plan.device.name}; {advice}"
    )


def _head(plan: Plan) -> Iterator[str]:
    target = "no engine" if plan.target is None else plan.target
    name = target if plan.device is None else f"{target} ({plan.device.name})"
    batch = plan.limits.max_batch_size
    limits = f"{batch} sequence{'s' * (batch > 1)} of {plan.limits.max_seq_len:,} tokens"
    yield f"{'plan':<{_NAME_WIDTH}}  {name}, {plan.precision}, {limits}"


def _weight_lines(plan: Plan) -> Iterator[str]:
    yield _line("weights", "resident", "read a token", "format")
    for group in plan.weights:
        yield _line(f"  {group.component}", size(group.num_bytes), traffic(group.read_bytes), group.format.name)
    yield _line("  in all", size(plan.weight_bytes), traffic(sum(group.read_bytes for group in plan.weights)))


def _state_lines(plan: Plan) -> Iterator[str]:
    yield _line("states", "of a sequence", "moved a token")
    for kind, use in plan.states.items():
        yield _line(f"  {kind}", size(use.num_bytes), traffic(use.token_bytes))
    yield _line("  in all", size(plan.sequence_bytes), traffic(sum(use.token_bytes for use in plan.states.values())))


def _memory_lines(plan: Plan) -> Iterator[str]:
    yield "memory"
    yield _line("  weights", size(plan.weight_bytes))
    yield _line("  states", size(plan.state_bytes))
    yield _line("  logits", size(plan.logits_bytes))
    if plan.activation_bytes is None:
        yield _line("  activations", "not yet known", "", "the engine build tells")
    else:
        yield _line("  activations", size(plan.activation_bytes))
    yield _line("  reserve", size(RESERVE_BYTES), "", "CUDA context, engine, buffers of a step")
    yield _line("  in all", size(plan.total_bytes), "", _verdict(plan))


def _tail(plan: Plan) -> Iterator[str]:
    if plan.ngram_table_bytes:
        yield f"{'n-gram table':<{_NAME_WIDTH}}  on the device, whole: this version has no other place for it"
    decode = f"{traffic(plan.token_bytes)} for a token of one sequence at {plan.limits.max_seq_len:,} tokens"
    if plan.device is not None and plan.decode_rate is not None:
        bandwidth = f"the {plan.device.bytes_per_second / 1e9:.0f} GB/s that others measured on a {plan.device.name}"
        decode = f"at most {plan.decode_rate:,.1f} tokens/s: {decode}, over {bandwidth}"
    yield f"{'decode':<{_NAME_WIDTH}}  {decode}"


def _verdict(plan: Plan) -> str:
    if plan.target is None:
        return ""
    if plan.device is None:
        return f"the memory of {plan.target} is not known"
    return f"{'does not fit' if plan.missing_bytes else 'fits'}: {size(plan.device.usable_bytes)} usable"


def _line(name: str, first: str, second: str = "", remark: str = "") -> str:
    return f"{name:<{_NAME_WIDTH}}  {first:>{_SIZE_WIDTH}}  {second:>{_SIZE_WIDTH}}  {remark}".rstrip()


def size(num_bytes: int) -> str:
    return _scaled(num_bytes, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10})


def traffic(num_bytes: int) -> str:
    return _scaled(num_bytes, {"GB": 10**9, "MB": 10**6, "kB": 10**3})


def _scaled(num_bytes: int, units: Mapping[str, int]) -> str:
    """In the largest of ``units`` that it has one of."""
    unit = next((unit for unit, factor in units.items() if num_bytes >= factor), None)
    return f"{num_bytes} B" if unit is None else f"{num_bytes / units[unit]:,.2f} {unit}"
