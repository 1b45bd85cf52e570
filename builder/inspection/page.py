"""The page of ``qwen4exp-inspect --html``: one file that loads nothing, with the document and what shows it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_FILES = files("qwen4exp_trt.builder.inspection") / "page_files"
_SCRIPTS = ("dom.js", "model.js", "layout.js", "graph.js", "bars.js", "panel.js", "tables.js", "search.js", "main.js")
"""In this order they are one script."""


def inspection_page(document: Mapping[str, Any]) -> str:
    """HTML that shows a document of ``--json``."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    # Inside a script element only "<" can begin something that ends it.
    parts = {
        "title": html.escape(f"{document['bundle']} - qwen4exp-inspect"),
        "css": _read("page.css"),
        "document": text.replace("<", "\\u003c"),
        "script": "\n".join(_read(name) for name in _SCRIPTS),
    }
    return re.sub("@([a-z]+)@", lambda mark: parts[mark[1]], _read("page.html"))


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")
