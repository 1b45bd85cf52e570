"""The page of ``qwen4exp-inspect --html`` in a headless browser, of a tiny model and of unusual documents."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Page
from inspection_page import OpenPage, all_of, op_with, panel_title, select
from released_model import RELEASED_CONFIG

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.inspection.bundle import StepRequest, inspect_bundle
from qwen4exp_trt.builder.inspection.document import Inspection
from qwen4exp_trt.builder.inspection.page import render_page
from qwen4exp_trt.builder.options import BuildOptions

pytestmark = pytest.mark.trt

MAX_PAGE_BYTES = 5 * 2**20
"""Of the released model's: small enough to send by mail."""


def test_the_graph_has_every_op_state_and_tensor(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(inspection)
    for part in inspection.parts:
        page.click(f'[data-part="{part.name}"]')
        blocks = page.count(".fold")
        assert page.count(".op") == 0 and blocks >= len({op.layer for op in part.ops})
        page.click("#unfold-all")
        drawn = all_of(page, ".op", "e.dataset.op")
        assert sorted(drawn) == sorted(op.path for op in part.ops)
        plugins = all_of(page, ".op.plugin", "e.dataset.op")
        assert sorted(plugins) == sorted(op.path for op in part.ops if op.kind == "plugin")
        states = all_of(page, ".state", "e.dataset.state")
        assert sorted(states) == sorted(state.name for state in part.states)
        flowing = {name for op in part.ops for name in op.inputs if part.values[name].kind == "result"}
        edges = all_of(page, ".edge[data-value]", "e.dataset.value")
        assert set(edges) >= flowing
        page.click("#fold-all")
        assert (page.count(".op"), page.count(".fold")) == (0, blocks)


def test_boxes_do_not_overlap_and_edges_go_down(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(inspection)
    page.click("#unfold-all")
    widths = dict(all_of(page, ".edge[data-value]", "[e.dataset.value, +e.getAttribute('stroke-width')]"))
    stack, mixed = (f"layers.1.mlp_hyper_connection.hc_read.{name}" for name in ("combined", "mixed"))
    assert widths[stack] > widths[mixed] > 1  # of four streams, and of one
    boxes = all_of(page, ".op .box", "e.getBoundingClientRect().toJSON()")
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            is_apart_x = one["right"] <= other["left"] or other["right"] <= one["left"]
            assert is_apart_x or one["bottom"] <= other["top"] or other["bottom"] <= one["top"]
    part, tops = inspection.parts[0], dict(zip([op.path for op in drawn_ops(inspection, page)], boxes, strict=True))
    maker = {name: op.path for op in part.ops for name in op.outputs}
    for op in part.ops:
        for name in op.inputs:
            if name in maker:
                assert tops[maker[name]]["bottom"] < tops[op.path]["top"]


def drawn_ops(document: Inspection, page: Page) -> list[Any]:
    by_path = {op.path: op for op in document.parts[0].ops}
    return [by_path[path] for path in all_of(page, ".op", "e.dataset.op")]


def test_links_of_the_panel_lead_along_the_tensors(inspection: Inspection, open_page: OpenPage) -> None:
    page, part = open_page(inspection), inspection.parts[0]
    op = op_with(part, "q4e.gated_delta_rule")
    maker = next(each for each in part.ops if set(each.outputs) & set(op.inputs))
    select(page, op.path)
    page.click(f'[data-link="{maker.path}"]')
    assert panel_title(page) == maker.path
    assert page.evaluate("document.querySelector('.op.selected').dataset.op") == maker.path
    select(page, op.path)
    page.click(f'[data-link="{op.updates[0]}"]')
    assert f"Written by\n{op.path}" in page.text("#panel")
    assert page.count(".edge.effect.near") == 1
    weight = next(weight for weight in part.weights if weight.read_by == [op.path])
    select(page, op.path)
    page.click(f'[data-link="{weight.name}"]')
    assert all_of(page, ".op.selected", "e.dataset.op") == [op.path]


def test_search_finds_ops_tensors_weights_and_states(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(inspection)
    page.press("/")
    page.type("QSA self_attn attention")
    matches = all_of(page, "#matches .path", "e.innerText")
    assert all("self_attn" in path for path in matches)
    expected = [op.path for part in inspection.parts for op in part.ops if op.op == "q4e.qsa_attention"]
    assert [path for path in matches if path.endswith("qsa_attention")] == expected
    layers = {op.layer for op in inspection.parts[0].ops if op.op == "q4e.qsa_attention"}
    assert len(layers) == page.count(".fold.match") < page.count(".fold")
    page.press("ArrowDown")
    page.press("Enter")
    assert panel_title(page) == matches[1]
    assert page.count(".op.match") >= 1 and page.count("#matches:not([hidden])") == 0
    for kind, query in (("weight", "lm_head.weight"), ("state", "kv_cache"), ("input", "slot_ids")):
        page.press("/")
        page.evaluate("document.activeElement.value = ''")
        page.type(query)
        assert kind in page.text("#matches li small")
        page.press("Enter")
        assert query in panel_title(page)
    merged = next(weight for weight in inspection.parts[0].weights if len(weight.sources) > 1)
    page.press("/")
    page.evaluate("document.activeElement.value = ''")
    page.type(merged.sources[1])
    page.press("Enter")
    assert panel_title(page) == merged.name
    assert merged.sources[1] in page.text("#panel").replace("\n", "")
    page.press("/")
    page.type("no such thing")
    assert page.text("#matches") == "nothing found"
    page.press("Escape")
    assert page.evaluate("document.getElementById('search').value") == ""


def test_keys_walk_through_the_graph(inspection: Inspection, open_page: OpenPage) -> None:
    page, ops = open_page(inspection), inspection.parts[0].ops
    select(page, ops[0].path)
    for op in (ops[1], ops[2], ops[3]):
        page.press("ArrowDown")
        assert panel_title(page) == op.path
        assert page.evaluate("document.activeElement.dataset.op") == op.path
    page.press("ArrowUp")
    assert panel_title(page) == ops[2].path
    page.press("Escape")
    page.click("#fold-all")
    page.evaluate("document.querySelector('.fold').focus()")
    page.press("ArrowRight")
    assert page.count(".block.open") == 1
    page.press("ArrowLeft")
    page.press("ArrowDown")
    page.press("Enter")
    assert page.evaluate("document.querySelector('.block.open').dataset.block") == "b1"


def test_the_address_says_what_is_shown(inspection: Inspection, open_page: OpenPage) -> None:
    page, part = open_page(inspection), inspection.parts[1]
    page.click('[data-profile="prefill"]')
    page.click(f'[data-part="{part.name}"]')
    page.click('[data-tab="layers"]')
    op = part.ops[len(part.ops) // 2]
    page.click(f'[data-row="{op.path}"]')
    again = open_page(inspection, hash=page.evaluate("location.hash"))
    for each in (page, again):
        assert panel_title(each) == op.path
        assert each.text('[data-part][aria-pressed="true"]') == "Draft head"
        assert each.text('[data-profile][aria-pressed="true"]') == "Prefill"
        assert each.text('[role="tab"][aria-selected="true"]') == "Layers"
    assert open_page(inspection, hash="#part=none&op=none&tab=none&profile=none&component=none").count(".fold") > 0


def test_it_fits_the_window(inspection: Inspection, open_page: OpenPage) -> None:
    for width, scheme in ((1280, "light"), (1920, "dark")):
        page = open_page(inspection, width=width, height=width * 9 // 16, scheme=scheme)
        page.click("#unfold-all")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("(e => e.scrollWidth - e.clientWidth)(document.getElementById('view'))") <= 0
        colors = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        text, back = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
        assert (text < back) == (scheme == "light") and abs(text - back) > 400


def test_it_prints_without_controls(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(inspection)
    assert page.evaluate("document.querySelector('.search').checkVisibility()")
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    controls = all_of(page, ".search, .switch, .tools, .tabs", "e.checkVisibility()")
    assert controls and not any(controls)
    assert page.evaluate("document.getElementById('view').scrollHeight") == page.box("#view")["height"]
    assert page.pdf().startswith(b"%PDF")


def test_no_text_becomes_markup(inspection: Inspection, open_page: OpenPage) -> None:
    hostile = "</title></script><img src=x onerror=\"document.title='run'\"><!--<script> & \u2028 @css@"
    part = inspection.parts[0]
    assert part.engine is not None
    layers = [replace(part.engine.layers[0], name=hostile, ops=[], inspector={"Metadata": hostile})]
    op = replace(part.ops[0], path=hostile, engine_layers={"decode": [0]})
    others = [replace(each, engine_layers={}) for each in part.ops[1:]]
    document = replace(
        inspection,
        bundle=f"/x/{hostile}",
        options={**inspection.options, "precision": hostile},
        warnings=[hostile],
        parts=[replace(part, ops=[op, *others], engine=replace(part.engine, layers=layers))],
    )
    page = open_page(document)
    assert page.evaluate("document.title").startswith("/x/</title></script>")
    facts = all_of(page, "#facts dt", "e.textContent")
    assert facts[-1] == "warning" and all_of(page, "#facts dd", "e.textContent")[-1] == hostile
    page.click("#unfold-all")
    page.click(".op")
    assert page.evaluate("document.getElementById('panel-title').textContent") == hostile
    assert json.dumps(hostile, ensure_ascii=False) in page.evaluate("document.getElementById('panel').textContent")
    page.press("/")
    page.type("<img src=x")
    assert hostile in page.evaluate("document.querySelector('#matches .path').textContent")
    assert page.count("img") == 0


@pytest.mark.slow
@pytest.mark.time_limit(400)
def test_the_released_model(tmp_path: Path, quick_builds: None, open_page: OpenPage) -> None:
    folder = tmp_path / "bundle"
    build_bundle(BuildOptions(checkpoint=RELEASED_CONFIG, output=folder, config_only=True, precision="nvfp4"))
    document = inspect_bundle(folder, StepRequest())
    assert len(render_page(document).encode()) < MAX_PAGE_BYTES
    page, ops = open_page(document), document.parts[0].ops
    assert {op.layer for op in ops} == {None, *range(48)}
    milliseconds = page.evaluate(
        "(begin => (document.getElementById('unfold-all').click(), document.querySelector('svg').getBBox(),"
        " performance.now() - begin))(performance.now())"
    )
    assert page.count(".op") == len(ops)
    assert milliseconds < 2000
    select(page, op_with(document.parts[0], "q4e.nvfp4_moe").path)
    assert page.count(".op.selected") == 1
