from __future__ import annotations

import math

from qwen4exp_trt.runtime.drafts.acceptance import GIVE_UP_AFTER, DraftCounters, RequestAcceptance


def test_a_request_is_off_after_a_window_in_vain() -> None:
    acceptance = RequestAcceptance()
    for _ in range(GIVE_UP_AFTER - 1):
        acceptance.count(3, 0)
    assert not acceptance.is_off
    acceptance.count(3, 1)
    for _ in range(GIVE_UP_AFTER):
        assert not acceptance.is_off, "one accepted draft begins a new window"
        acceptance.count(2, 0)
    assert acceptance.is_off
    assert (acceptance.num_proposed, acceptance.num_accepted) == (3 * GIVE_UP_AFTER + 2 * GIVE_UP_AFTER, 1)


def test_rates_are_by_position() -> None:
    counters = DraftCounters(3)
    for proposed, accepted in ((3, 3), (3, 1), (2, 0), (1, 1)):
        counters.count(proposed, accepted)
    assert counters.num_drafts == 4
    assert (counters.proposed_per_position, counters.accepted_per_position) == ([4, 3, 2], [3, 1, 1])
    assert counters.acceptance_rates == [3 / 4, 1 / 3, 1 / 2]
    assert (counters.num_proposed, counters.num_accepted) == (9, 5)
    assert math.isnan(DraftCounters(1).acceptance_rates[0])
