"""What `LayerWatch` has seen, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.layer_watch import LayerWatch, Place, ValueCheck
from qwen4exp_trt.runtime.side_by_side import Difference
from qwen4exp_trt.runtime.specs import TensorSpec

_MOST_NAMES = 6


def layer_table(watches: Sequence[LayerWatch]) -> Iterator[str]:
    """A line for each value: its error from the program's own run and from what the program makes of the engine's."""
    yield f"{'error':>9} {'own error':>9}  {'dtype':13} {'shape':16}  value, and the op that makes it"
    for watch in watches:
        for check in watch.checks:
            tensor, maker, shape = check.place.tensor, check.place.ops[-1], "x".join(map(str, check.shape))
            made_by = f"({maker.op})" if f"{tensor}.".startswith(f"{maker.path}.") else f"by {maker}"
            errors = f"{check.error:9.2e} {check.own_error:9.2e}"
            yield f"{errors}  {check.dtype:13} {shape:16}  {watch.owner}{tensor} {made_by}"


def step_line(step: str, differences: Sequence[Difference], checks: Sequence[ValueCheck]) -> str:
    """The largest error of a step, and if values between the layers are shown, which op's error is the largest."""
    worst = max(difference.error for difference in differences)
    line = f"{step:42} largest error {worst:.2e} of {len(differences)} tensors"
    if not checks:
        return line
    check = _worst(checks)
    return f"{line}; of {len(checks)} ops and regions {check.own_error:.2e}, {check.place.tensor}"


def why_different(checks: Sequence[ValueCheck]) -> str:
    """What can be said about states or results that differ, while every value is made right."""
    if not checks:
        return "build it with --mark-plugin-inputs, and this command names the op"
    check = _worst(checks)
    return (
        f"no op is at fault, for on what the engine reads each gives what the engine has within {check.own_error:.2g} "
        f"({check.place.tensor}): the difference has grown over the layers, which --layers shows"
    )


def when_all_agree(marked: Sequence[TensorSpec]) -> str:
    """What that means for the engine without marked values."""
    return (
        f"so do the {len(marked)} plugin inputs that it shows; if the same bundle without --mark-plugin-inputs does "
        "not agree, TensorRT reuses the memory of one of them too early: build with half of them marked to find it"
    )


def _worst(checks: Sequence[ValueCheck]) -> ValueCheck:
    """The one with the largest own error, NaN first."""
    return max(checks, key=lambda check: (check.own_error != check.own_error, check.own_error))


def check_layers(step: str, watch: LayerWatch) -> None:
    """`BundleError` for the first value that the engine has made otherwise than the program would have."""
    for check in watch.checks:
        if not check.own_error <= watch.tolerance:
            raise BundleError(f"{step}: {_describe(check, watch)}")


def _describe(check: ValueCheck, watch: LayerWatch) -> str:
    place = check.place
    shape = ", ".join(map(str, check.shape))
    errors = (
        f"own error {check.own_error:.3g}, tolerance {watch.tolerance:g}; {check.error:.3g} from the program's own run"
    )
    what = "state" if place.state is not None else "value"
    lines = [
        f"the first {what} that the engine makes otherwise than the program is {watch.owner}{place.tensor}, "
        f"{check.dtype} [{shape}] ({errors}): {check.difference}.",
        f"It is made by {listing(map(str, place.ops), _MOST_NAMES)}{_sources(place, watch.checks)}",
        f"and read by {listing(place.readers, _MOST_NAMES)}." if place.readers else "and read by no later plugin.",
        _next_step(place),
    ]
    return "\n".join(lines)


def _sources(place: Place, checks: Sequence[ValueCheck]) -> str:
    """What it was made from, and how far that is from the program's own run."""
    if not place.sources:
        return " from inputs of the step, weights and states"
    by_name = {check.place.tensor: check.error for check in checks}
    largest = max((by_name[name] for name in place.sources), key=lambda error: (error != error, error))
    names = listing(place.sources, _MOST_NAMES)
    return f" from {names} (error {largest:.2g} from the program's own run)"


def _next_step(place: Place) -> str:
    """How to find out more."""
    hidden = [f"'{op.path}'" for op in place.ops if op.is_plugin and not op.is_shown]
    if hidden:
        return (
            "One of these ops is wrong, or reads something else than it should; to see between them mark more of what "
            f"they read: qwen4exp-build --mark-plugin-inputs {' '.join(hidden)}"
        )
    if len(place.ops) == 1 and place.ops[0].is_plugin:
        return (
            "What this plugin reads agrees as the engine shows it, so its kernel is wrong on this GPU, or it reads "
            "something else than what is shown"
        )
    return "One of these ops is wrong, or its result was overwritten before it was shown or read"
