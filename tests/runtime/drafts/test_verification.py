from __future__ import annotations

import pytest

from qwen4exp_trt.runtime.drafts.verification import verified
from qwen4exp_trt.runtime.sampler import SampledToken


def token(token_id: int) -> SampledToken:
    return SampledToken(token_id, -1.0, 1, None)


@pytest.mark.parametrize(
    ("drafts", "rows", "expected"),
    [
        ([], [5], [5]),
        ([5, 6], [5, 6, 7], [5, 6, 7]),
        ([5, 6], [5, 9, 7], [5, 9]),
        ([5, 6], [9, 6, 7], [9]),
        ([5, 6], [None, 6, 7], [None]),
        ([5, 6], [5, None, 7], [5, None]),
        ([5, 6], [9, None, None], [9]),
    ],
    ids=["none", "all", "one", "no", "bad first", "bad second", "bad behind"],
)
def test_tokens_up_to_the_first_that_is_not_its_draft(
    drafts: list[int], rows: list[int | None], expected: list[int | None]
) -> None:
    tokens = [None if row is None else token(row) for row in rows]
    assert verified(drafts, tokens) == [None if each is None else token(each) for each in expected]
