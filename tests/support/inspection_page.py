"""What tests of the page of ``qwen4exp-inspect --html`` share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from browser import Page

from qwen4exp_trt.builder.inspection.document import Part

OpenPage = Callable[..., Page]
"""Opens the page of a document: the fixture ``open_page``."""


def panel_title(page: Page) -> str:
    """Without the line breaks that its width makes."""
    return page.text("#panel-title").replace("\n", "")


def all_of(page: Page, selector: str, of: str) -> list[Any]:
    """The JavaScript expression ``of`` for each element ``e``."""
    return page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => {of})")


def op_with(part: Part, op: str) -> Any:
    return next(each for each in part.ops if each.op == op)


def select(page: Page, path: str) -> None:
    page.evaluate(f"location.hash = {json.dumps('#op=' + path)}")
    page.evaluate("new Promise(done => setTimeout(done, 50))")
