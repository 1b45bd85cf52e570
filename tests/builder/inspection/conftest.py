from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import pytest
from browser import Browser, Page, open_browser
from inspection_page import OpenPage

from qwen4exp_trt.builder.inspection.bundle import StepRequest, inspect_bundle
from qwen4exp_trt.builder.inspection.document import Inspection
from qwen4exp_trt.builder.inspection.page import render_page


@pytest.fixture(scope="session")
def mtp_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a draft head, which no test changes."""
    return bundles.mtp_checkpoint(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def engine_bundle(mtp_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 bundle with the engines of a random model and its draft head, which no test changes."""
    with bundles.quick_builds():
        folder = tmp_path_factory.mktemp("inspected") / "bundle"
        return bundles.build(mtp_checkpoint, folder, activation_dtype="bfloat16")


@pytest.fixture(scope="session")
def inspection(engine_bundle: Path) -> Inspection:
    return inspect_bundle(engine_bundle, StepRequest())


@pytest.fixture(scope="session")
def float_bundle(mtp_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint in float32, without an engine and a draft head."""
    with bundles.quick_builds():
        return bundles.build(mtp_checkpoint, tmp_path_factory.mktemp("float32") / "bundle", draft_head="none")


@pytest.fixture(scope="session")
def float_inspection(float_bundle: Path) -> Inspection:
    return inspect_bundle(float_bundle, StepRequest())


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[OpenPage]:
    """Opens the page of a document. After the test it must have complained about nothing and loaded nothing."""
    pages: list[Page] = []

    def open_page(document: Inspection, **options: Any) -> Page:
        path = tmp_path / "page.html"
        path.write_text(render_page(document), encoding="utf-8")
        pages.append(browser.open(path, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.evaluate("0")
        assert page.errors == []
        assert {re.sub("[?#].*", "", url) for url in page.requests} == {(tmp_path / "page.html").as_uri()}
