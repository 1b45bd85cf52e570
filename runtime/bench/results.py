"""Measures a case, and says what its times mean: rates, and the roofline beside them."""

from __future__ import annotations

from typing import Any

from qwen4exp_trt.runtime.bench.cases import Case, DecodeCase, Effort, GenerateCase
from qwen4exp_trt.runtime.bench.decode import DecodeTimes, measure_decode
from qwen4exp_trt.runtime.bench.document import plain
from qwen4exp_trt.runtime.bench.generate import GenerateTimes, measure_generate
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle
from qwen4exp_trt.runtime.bench.prefill import PrefillTimes, measure_prefill
from qwen4exp_trt.runtime.bench.roofline import Floor, Rooflines, decode_floor, prefill_floor

Times = DecodeTimes | PrefillTimes | GenerateTimes


def measure(bundle: LoadedBundle, case: Case, effort: Effort) -> Times:
    """The times of ``case``. Q4eError, or what torch raises, if it cannot be run."""
    if isinstance(case, DecodeCase):
        return measure_decode(bundle, case, effort)
    if isinstance(case, GenerateCase):
        return measure_generate(bundle, case, effort)
    return measure_prefill(bundle, case, effort)


def describe(bundle: LoadedBundle, case: Case, times: Times, rooflines: Rooflines) -> dict[str, Any]:
    """JSON values: the times and what follows from them."""
    if isinstance(case, DecodeCase):
        assert isinstance(times, DecodeTimes)
        return {**plain(times), **_about_decode(bundle, case, times, rooflines)}
    if isinstance(case, GenerateCase):
        return plain(times)
    assert isinstance(times, PrefillTimes)
    first = times.first_token_ms.median
    floor = prefill_floor(bundle.backend.program, times.chunks, rooflines)
    return {**plain(times), "tokens_per_second": 1e3 * case.prompt / first, **_beside(floor, first)}


def _about_decode(bundle: LoadedBundle, case: DecodeCase, times: DecodeTimes, rooflines: Rooflines) -> dict[str, Any]:
    step, draft = times.step_ms.median, bundle.backend.draft
    floor = decode_floor(bundle.backend.program, None if draft is None else draft.program, case, rooflines)
    return {
        "host_ms": None if times.device is None else step - times.device.step_ms.median,
        "tokens_per_second": 1e3 * case.batch / step,
        "tokens_per_second_if_all_accepted": 1e3 * case.batch * case.rows / step,
        **_beside(floor, step),
    }


def _beside(floor: Floor, milliseconds: float) -> dict[str, Any]:
    return {"floor": plain(floor), "share_of_roofline": floor.shares(milliseconds)}
