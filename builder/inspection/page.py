"""The page of ``qwen4exp-inspect --html``: one file that loads nothing, with the document and what shows it."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files

from qwen4exp_trt.builder.inspection.document import Inspection

_FILES = files("qwen4exp_trt.builder.inspection") / "page_files"
_SCRIPTS = ("dom.js", "model.js", "layout.js", "graph.js", "bars.js", "panel.js", "tables.js", "search.js", "main.js")
"""In this order they are one script."""


def render_page(document: Inspection) -> str:
    """HTML that shows the document, searchable, in any browser and without a network."""
    text = json.dumps(document.to_json(), separators=(",", ":"), ensure_ascii=False)
    parts = {
        "title": html.escape(f"{document.bundle} - qwen4exp-inspect"),
        "css": _read("page.css"),
        # In a script element only "<" can begin something that ends it.
        "document": text.replace("<", "\\u003c"),
        "script": "\n".join(_read(name) for name in _SCRIPTS),
    }
    return re.sub("@([a-z]+)@", lambda mark: parts[mark[1]], _read("page.html"))


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")
