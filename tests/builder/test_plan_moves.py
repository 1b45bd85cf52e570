"""What is offered instead of a plan that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_requests import plan_request, released_plan
from released_model import CONVERTED_TO_NVFP4, NVFP4_TABLE, OFFICIAL_FP8, PUBLISHED_NVFP4

from qwen4exp_trt.builder.plan import ActivationMemory, PlanRequest, PleResidency, make_plan
from qwen4exp_trt.builder.plan_moves import fitting_moves
from qwen4exp_trt.builder.plan_report import describe_misfit, describe_total
from qwen4exp_trt.passes.choose_formats import Formats
from qwen4exp_trt.runtime.target_devices import DEVICES

SMALLEST = PUBLISHED_NVFP4 | NVFP4_TABLE
ON_DISK, NVFP4_PLE, NVFP4_BODY = "--ple-residency disk", "--ple nvfp4", "--precision nvfp4"
FP8_KV = "--kv-cache-dtype fp8"


def request_for(checkpoint: Formats, batch: int, max_seq_len: int) -> PlanRequest:
    """A policy of the two choices, each to keep what the checkpoint has or to convert it."""

    def choose_formats(precision: str, ple: str) -> Formats:
        body = checkpoint if precision == "checkpoint" else CONVERTED_TO_NVFP4
        table = checkpoint if ple == "checkpoint" else NVFP4_TABLE
        return {name: fmt for name, fmt in body.items() if "ngram" not in name} | {
            name: fmt for name, fmt in table.items() if "ngram" in name
        }

    return replace(plan_request({}, batch, max_seq_len), choose_formats=choose_formats)


@pytest.mark.parametrize(
    ("checkpoint", "batch", "max_seq_len", "options"),
    [
        (PUBLISHED_NVFP4, 1, 2051, [(ON_DISK,), (NVFP4_PLE,)]),
        (PUBLISHED_NVFP4, 1, 262_144, [(ON_DISK,), (NVFP4_PLE,)]),
        (SMALLEST, 8, 262_144, [("--max-batch-size 2",), ("--max-seq-len 61760",)]),
        (SMALLEST, 3, 262_144, [(ON_DISK,), (FP8_KV,), ("--max-batch-size 2",), ("--max-seq-len 173696",)]),
        (OFFICIAL_FP8, 1, 262_144, [(ON_DISK, NVFP4_BODY), (NVFP4_PLE, NVFP4_BODY)]),
        (
            PUBLISHED_NVFP4,
            8,
            262_144,
            [
                (ON_DISK, FP8_KV),
                (ON_DISK, "--max-batch-size 6"),
                (ON_DISK, "--max-seq-len 203456"),
                (NVFP4_PLE, "--max-batch-size 2"),
                (NVFP4_PLE, "--max-seq-len 61760"),
            ],
        ),
        (SMALLEST, 4096, 262_144, [("--max-batch-size 2",)]),
        (
            {},
            4096,
            262_144,
            [(ON_DISK, NVFP4_BODY, "--max-batch-size 6"), (NVFP4_PLE, NVFP4_BODY, "--max-batch-size 2")],
        ),
    ],
)
def test_as_few_options_as_are_enough(
    checkpoint: Formats, batch: int, max_seq_len: int, options: list[tuple[str, ...]]
) -> None:
    """Each alone, else each combination of as few as fit."""
    assert fitting_moves(request_for(checkpoint, batch, max_seq_len)) == options


@pytest.mark.parametrize(
    ("option", "limit", "step"), [("--max-seq-len", "max_seq_len", 64), ("--max-batch-size", "max_batch_size", 1)]
)
def test_a_limit_is_the_largest_that_fits(option: str, limit: str, step: int) -> None:
    request = request_for(SMALLEST, 8, 262_144)
    (text,) = (options[0] for options in fitting_moves(request) if options[0].startswith(option))
    value = int(text.removeprefix(option))
    for offered, fits in ((value, True), (value + step, False)):
        limits = replace(request.limits, **{limit: offered})
        assert (make_plan(replace(request, limits=limits)).missing_bytes == 0) is fits


def test_a_shorter_context_has_a_smaller_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the table that a step stages are those of at most ``max_seq_len`` tokens."""
    request = replace(request_for(SMALLEST, 1, 4096), ple_residency=PleResidency.DISK)
    shortest = replace(request.limits, max_seq_len=64, prefill_chunk=64)
    usable = make_plan(replace(request, limits=shortest)).total_bytes
    monkeypatch.setitem(DEVICES, "sm121", replace(DEVICES["sm121"], usable_bytes=usable))
    assert ("--max-seq-len 64",) in fitting_moves(request)


def test_host_memory_is_offered_where_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "sm121", replace(DEVICES["sm121"], is_unified=False))
    assert fitting_moves(request_for(PUBLISHED_NVFP4, 1, 2051))[0] == ("--ple-residency host",)


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "sm121", replace(DEVICES["sm121"], usable_bytes=64 * 2**30))
    message = describe_misfit(make_plan(request_for({}, 8, 262_144)))
    assert message is not None and message.endswith("; all options that save memory together do not make it fit")


def test_message() -> None:
    plan = make_plan(request_for(OFFICIAL_FP8, 1, 2051))
    assert describe_misfit(plan) == (
        "precision checkpoint needs 171.60 GiB (169.43 GiB of it weights), 57.60 GiB more than the 114.00 GiB that are "
        "usable on a GB10; it fits with --ple-residency disk and --precision nvfp4, or with --ple nvfp4 and "
        "--precision nvfp4"
    )


def test_activations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = released_plan(SMALLEST)
    monkeypatch.setitem(DEVICES, "sm121", replace(DEVICES["sm121"], usable_bytes=plan.total_bytes))
    assert plan.missing_bytes == 0
    more = make_plan(replace(plan.request, activations=ActivationMemory(1, is_estimate=True)))
    assert more.missing_bytes == 1 and describe_misfit(more) is not None


def test_a_plan_that_fits_and_an_unknown_target() -> None:
    fitting = released_plan(SMALLEST)
    assert describe_misfit(fitting) is None and describe_total(fitting).endswith(", fits: 114.00 GiB usable")
    unknown = make_plan(replace(plan_request({}), target="sm90"))
    assert describe_misfit(unknown) is None and unknown.decode_rate is None and unknown.missing_bytes == 0
    assert describe_total(unknown) == "331.76 GiB, the memory of sm90 is not known"
    assert describe_total(make_plan(replace(unknown.request, target=None))) == "331.76 GiB"
