"""The plan of a build in words. Memory is in binary units, what a token reads and writes in decimal ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qwen4exp_trt.builder.plan import Plan
from qwen4exp_trt.builder.plan_moves import fitting_moves
from qwen4exp_trt.builder.weight_bytes import WeightGroup
from qwen4exp_trt.runtime.memory_plan import GPU_OVERHEAD_BYTES
from qwen4exp_trt.runtime.weight_formats import WeightFormat

_NAME_WIDTH = 22
_SIZE_WIDTH = 14


def format_plan(plan: Plan) -> str:
    """The table that precedes a build, and that ``--plan`` prints."""
    return "\n".join([*_head(plan), *_weight_lines(plan), *_state_lines(plan), *_memory_lines(plan), *_tail(plan)])


def describe_total(plan: Plan) -> str:
    """The memory in all, and whether the target has as much."""
    return ", ".join(filter(None, (size(plan.total_bytes), _verdict(plan))))


def describe_misfit(plan: Plan) -> str | None:
    """What exceeds the target's memory, and which options help; None for a plan that fits or an unknown target."""
    if plan.device is None or not plan.missing_bytes:
        return None
    options = ", or with ".join(" and ".join(combination) for combination in fitting_moves(plan.request))
    advice = f"it fits with {options}" if options else "all options that save memory together do not make it fit"
    if plan.debug_bytes:
        advice = (
            f"{size(plan.debug_bytes)} of it is what --mark-plugin-inputs marks: give it patterns that match fewer "
            f"plugins, or a smaller --prefill-chunk; else {advice}"
        )
    return (
        f"precision {plan.request.precision} needs {size(plan.total_bytes)} ({size(plan.weight_bytes)} of it weights), "
        f"{size(plan.missing_bytes)} more than the {size(plan.device.usable_bytes)} that are usable on a "
        f"{plan.device.name}; {advice}"
    )


def _head(plan: Plan) -> Iterator[str]:
    request = plan.request
    target = "no engine" if request.target is None else request.target
    name = target if plan.device is None else f"{target} ({plan.device.name})"
    batch = request.limits.max_batch_size
    limits = f"{batch} sequence{'s' * (batch > 1)} of {request.limits.max_seq_len:,} tokens"
    dtypes = f"activations {request.activation_dtype}, KV cache {request.kv_dtype}"
    table = f"n-gram table {request.ple} on {request.ple_residency}, " if plan.ngram_table_bytes else ""
    yield _row("plan", f"{name}, {limits}")
    yield _row("options", f"precision {request.precision}, {table}{dtypes}")
    if not request.has_stored_formats:
        yield _row("checkpoint", "its files are not read: every weight is taken to be stored in float, none quantized")


def _weight_lines(plan: Plan) -> Iterator[str]:
    yield _line("weights", "resident", "read a token", "format")
    for group in plan.weights:
        resident = group.num_bytes if plan.is_resident(group) else 0
        yield _line(f"  {group.component}", size(resident), traffic(group.read_bytes), _format_remark(plan, group))
    of_model = [group.read_bytes for group in plan.weights if not group.component.is_of_draft_head]
    yield _line("  in all", size(plan.weight_bytes), traffic(sum(of_model)))


def _format_remark(plan: Plan, group: WeightGroup) -> str:
    name = plan.request.activation_dtype if group.format is WeightFormat.FLOAT else group.format
    return name if plan.is_resident(group) else f"{name}, {size(group.num_bytes)} on {plan.request.ple_residency}"


def _state_lines(plan: Plan) -> Iterator[str]:
    yield _line("states", "of a sequence", "moved a token")
    for kind, use in plan.states.items():
        yield _line(f"  {kind}", size(use.num_bytes), traffic(use.token_bytes))
    if drafts := plan.draft_states.values():
        moved = sum(use.token_bytes for use in drafts)
        yield _line("  draft head", size(sum(use.num_bytes for use in drafts)), traffic(moved))
    yield _line("  in all", size(plan.sequence_bytes), traffic(sum(use.token_bytes for use in plan.states.values())))


def _memory_lines(plan: Plan) -> Iterator[str]:
    activations = plan.request.activations
    yield "memory"
    yield _line("  weights", size(plan.weight_bytes))
    if plan.staged_bytes:
        yield _line("  n-gram rows", size(plan.staged_bytes), "", "from disk: of one step, and the last ones read")
    yield _line("  states", size(plan.state_bytes))
    yield _line("  logits", size(plan.logits_bytes))
    if plan.stack_bytes:
        yield _line("  stacks", size(plan.stack_bytes), "", "for the draft head")
    if plan.debug_bytes:
        num_marked = len(plan.request.debug_outputs)
        yield _line("  debug outputs", size(plan.debug_bytes), "", f"{num_marked} plugin inputs that are marked")
    remark = "an estimate; the engine build tells" if activations.is_estimate else "of the engine"
    yield _line("  activations", size(activations.num_bytes), "", remark)
    if activations.workspace_bytes:
        remark = "of the activations, at most: larger steps take turns in it"
        yield _line("    workspace", size(activations.workspace_bytes), "", remark)
    yield _line("  reserve", size(GPU_OVERHEAD_BYTES), "", "CUDA context, engine, buffers of a step")
    yield _line("  in all", size(plan.total_bytes), "", _verdict(plan))


def _tail(plan: Plan) -> Iterator[str]:
    decode = f"{traffic(plan.token_bytes)} for a token of one sequence at {plan.request.limits.max_seq_len:,} tokens"
    if plan.device is not None and plan.decode_rate is not None:
        bandwidth = f"the {plan.device.bytes_per_second / 1e9:.0f} GB/s that others measured on a {plan.device.name}"
        decode = f"at most {plan.decode_rate:,.1f} tokens/s: {decode}, over {bandwidth}"
    yield _row("decode", decode)
    if plan.draft_token_bytes:
        yield _row("draft", f"{traffic(plan.draft_token_bytes)} for each token that the draft head proposes")


def _verdict(plan: Plan) -> str:
    if plan.request.target is None:
        return ""
    if plan.device is None:
        return f"the memory of {plan.request.target} is not known"
    return f"{'does not fit' if plan.missing_bytes else 'fits'}: {size(plan.device.usable_bytes)} usable"


def _row(name: str, text: str) -> str:
    return f"{name:<{_NAME_WIDTH}}  {text}"


def _line(name: str, first: str, second: str = "", remark: str = "") -> str:
    return f"{name:<{_NAME_WIDTH}}  {first:>{_SIZE_WIDTH}}  {second:>{_SIZE_WIDTH}}  {remark}".rstrip()


def size(num_bytes: int) -> str:
    return _scaled(num_bytes, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10})


def traffic(num_bytes: int) -> str:
    return _scaled(num_bytes, {"GB": 10**9, "MB": 10**6, "kB": 10**3})


def work(flops: int) -> str:
    return _scaled(flops, {"TFLOP": 10**12, "GFLOP": 10**9, "MFLOP": 10**6, "kFLOP": 10**3}, "FLOP")


def _scaled(number: int, units: Mapping[str, int], one: str = "B") -> str:
    """In the largest of ``units`` that it has one of, else in ``one``."""
    unit = next((unit for unit, factor in units.items() if number >= factor), None)
    return f"{number} {one}" if unit is None else f"{number / units[unit]:,.2f} {unit}"
