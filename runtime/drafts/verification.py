"""Which of a step's tokens a sequence takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from qwen4exp_trt.runtime.sampler import SampledToken

Token = TypeVar("Token", bound=SampledToken | None)


def verified(draft_token_ids: Sequence[int], row_tokens: Sequence[Token]) -> list[Token]:
    """The tokens that a sequence takes of those sampled at its rows: one more than drafts are accepted.

    Row i has read the drafts before draft i, so its token is good if they all are; it is the draft itself where that is
    accepted, and else the last one. The list ends early with None at a row whose logits were unusable.
    """
    assert len(row_tokens) == len(draft_token_ids) + 1, "a row for the last token and for each draft"
    taken: list[Token] = []
    for index, token in enumerate(row_tokens):
        taken.append(token)
        is_last = index == len(draft_token_ids)
        if token is None or is_last or token.token_id != draft_token_ids[index]:
            break
    return taken
