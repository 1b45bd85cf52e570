from __future__ import annotations

import math

from qwen4exp_trt.runtime.drafts.acceptance import GIVE_UP_AFTER, DraftCounters, RequestAcceptance


def test_a_request_is_off_after_a_window_in_vain() -> None:
    acceptance = RequestAcceptance()
    for _ in range(GIVE_UP_AFTER - 1):
        acceptance.count(0)
    assert not acceptance.is_off
    acceptance.count(1)
    for _ in range(GIVE_UP_AFTER):
        assert not acceptance.is_off, "one accepted draft begins a new window"
        acceptance.count(0)
    assert acceptance.is_off


def test_rates_are_by_position() -> None:
    counters = DraftCounters(3)
    for proposed, accepted in ((3, 3), (3, 1), (2, 0), (1, 1)):
        counters.count(proposed, accepted)
    assert (counters.proposed_per_position, counters.accepted_per_position) == ([4, 3, 2], [3, 1, 1])
    assert counters.acceptance_rates == [3 / 4, 1 / 3, 1 / 2]
    assert math.isnan(DraftCounters(1).acceptance_rates[0])
    metrics = {metric.name: metric for metric in counters.collect()}
    accepted = metrics["qwen4exp_spec_decode_num_accepted_tokens_per_pos"]
    assert accepted.kind == "counter"
    assert [(sample.labels["position"], sample.value) for sample in accepted.samples] == [("0", 3), ("1", 1), ("2", 1)]
    assert metrics["qwen4exp_spec_decode_acceptance_rate_per_pos"].samples[2].value == 1 / 2
