"""The page of ``qwen4exp-inspect --html`` in a headless browser, of a tiny model and of unusual documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, open_browser
from released_model import RELEASED_CONFIG

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.inspection.bundle import StepRequest, inspect_bundle
from qwen4exp_trt.builder.inspection.document import CostInfo, Inspection, Part
from qwen4exp_trt.builder.inspection.page import render_page
from qwen4exp_trt.builder.options import BuildOptions

pytestmark = pytest.mark.trt

MAX_PAGE_BYTES = 5 * 2**20
"""Of the released model's: small enough to send by mail."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


OpenPage = Callable[..., Page]


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


def panel_title(page: Page) -> str:
    """Without the line breaks that its width makes."""
    return page.text("#panel-title").replace("\n", "")


def all_of(page: Page, selector: str, of: str) -> list[Any]:
    """The JavaScript expression ``of`` for each element ``e``."""
    return page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => {of})")


def op_with(part: Part, op: str) -> Any:
    return next(each for each in part.ops if each.op == op)


def shown_costs(page: Page) -> dict[str, list[str]]:
    """The rows of the panel's table by their titles, a column a profile."""
    rows = all_of(page, "#panel-costs tr", "[...e.cells].map(c => c.innerText)")
    return {title: values for title, *values in rows}


def as_number(text: str) -> float:
    """What a figure of the page says, without its unit: 1.35 of "1.35 MB" is 1.35e6."""
    number, _, unit = text.partition(" ")
    prefixes = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KiB": 2**10, "MiB": 2**20}
    scale = prefixes.get(unit, prefixes.get(unit[:1], 1.0)) if unit != "B" else 1.0
    return float(number.replace(",", "")) * scale


def as_share(text: str) -> float:
    return float(text.strip("<%")) / 100


def select(page: Page, path: str) -> None:
    page.evaluate(f"location.hash = {json.dumps('#op=' + path)}")
    page.evaluate("new Promise(done => setTimeout(done, 50))")


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


def test_a_click_opens_the_panel_with_the_figures_of_the_document(inspection: Inspection, open_page: OpenPage) -> None:
    page, op = open_page(inspection), op_with(inspection.parts[0], "q4e.qsa_attention")
    title = f"layers.{op.layer}"
    page.click(f'[aria-label^="{title},"]')
    page.click(f'[data-op="{op.path}"]')
    assert panel_title(page) == op.path
    costs = shown_costs(page)
    assert costs["A step"] == list(inspection.profiles)
    for i, profile in enumerate(inspection.profiles):
        cost: CostInfo = op.costs[profile]
        assert cost.seconds is not None
        figures = {"Weights read": cost.weight_bytes, "States moved": cost.state_bytes, "FLOPs": cost.flops}
        for name, value in {**figures, "Activations": cost.activation_bytes, "Roofline": cost.seconds}.items():
            assert as_number(costs[name][i]) == pytest.approx(value, rel=0.006, abs=0.5e-9)  # ns are shown whole
        assert costs["Bound by"][i] == cost.bound
        assert as_share(costs["Share of step"][i]) == pytest.approx(cost.share, abs=6e-4)
    links = all_of(page, "#panel [data-link]", "e.dataset.link")
    assert set(links) >= {name for name in op.inputs if inspection.parts[0].values[name].kind != "result"}
    assert all(node.name in page.text("#panel") for node in op.onnx_nodes)
    engine = inspection.parts[0].engine
    assert engine is not None and op.engine_layers["decode"]
    assert all(engine.layers[i].type in page.text("#panel") for i in op.engine_layers["decode"])
    page.press("Escape")
    assert page.count("#panel-title") == 0


def test_shapes_have_the_extents_of_the_step(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(inspection, hash="#part=draft head&profile=prefill&op=mtp.fc_hidden.linear")
    assert page.text("#panel").count("bfloat16 [32, 32]") == 3  # both ends, of 4 streams of 8 tokens, and the weight
    page.click('[data-profile="decode"]')
    assert page.text("#panel").count("bfloat16 [4, 32]") == 2
    assert "[1, 8] in this step" in open_page(inspection, hash="#input=block_table").text("#panel")


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
    weight = next(weight for weight in part.weights if weight.read_by == [op.path])
    select(page, op.path)
    page.click(f'[data-link="{weight.name}"]')
    assert all_of(page, ".op.selected", "e.dataset.op") == [op.path]


MEASURES: dict[str, Callable[[CostInfo], float]] = {
    "time": lambda cost: cost.seconds or 0.0,
    "bytes": lambda cost: cost.weight_bytes + cost.state_bytes,
    "flops": lambda cost: cost.flops,
}


def test_bars_are_proportional(inspection: Inspection, open_page: OpenPage) -> None:
    page = open_page(inspection)
    for name, measure in MEASURES.items():
        page.click(f'[data-measure="{name}"]')
        names = all_of(page, "[data-component]", "e.dataset.component")
        widths = all_of(page, ".component .fill", "e.getBoundingClientRect().width")
        amounts = {each.name: measure(each.costs["decode"]) for each in inspection.parts[0].components if each.num_ops}
        assert names == sorted(amounts, key=amounts.__getitem__, reverse=True)
        assert widths[0] > 100
        for each, width in zip(names, widths, strict=True):
            assert width == pytest.approx(widths[0] * amounts[each] / amounts[names[0]], abs=1.1)
        shares = [amounts[each] / sum(amounts.values()) for each in names]
        shown = all_of(page, ".component .number .dim", "e.innerText")
        assert list(map(as_share, shown)) == pytest.approx(shares, abs=6e-4)
        parts = all_of(page, ".stacked i", "e.getBoundingClientRect().width")
        assert parts == pytest.approx([share * page.box(".stacked")["width"] for share in shares], abs=1.1)
    page.click("#unfold-all")
    widths = all_of(page, ".op .load", "+e.getAttribute('width')")
    loads = dict(zip(all_of(page, ".op", "e.dataset.op"), widths, strict=True))
    seconds = {op.path: op.costs["decode"].seconds or 0.0 for op in inspection.parts[0].ops}
    longest = max(seconds.values())
    assert 100 < max(widths) < all_of(page, ".op .box", "+e.getAttribute('width')")[0]
    assert loads == pytest.approx({path: max(widths) * each / longest for path, each in seconds.items()})
    blocks = [sum(seconds[op.path] for op in ops) for _, ops in groupby(inspection.parts[0].ops, lambda op: op.layer)]
    times = all_of(page, ".fold .value", "e.textContent")
    assert list(map(as_number, times)) == pytest.approx(blocks, rel=0.006, abs=0.5e-9)
    sums = "[...e.querySelectorAll('.load')].reduce((sum, each) => sum + Number(each.getAttribute('width')), 0)"
    widths = all_of(page, ".fold", sums)
    assert 100 < max(widths) < 140
    assert widths == pytest.approx([max(widths) * each / max(blocks) for each in blocks])


def test_a_component_filters_graph_and_tables(inspection: Inspection, open_page: OpenPage) -> None:
    page, part = open_page(inspection), inspection.parts[0]
    component = part.components[-2].name
    members = [op.path for op in part.ops if op.component == component]
    assert 0 < len(members) < len(part.ops)
    page.click("#unfold-all")
    page.click(f'[data-component="{component}"]')
    bright = all_of(page, ".op:not(.faded)", "e.dataset.op")
    assert sorted(bright) == sorted(members)
    page.click('[data-tab="layers"]')
    assert page.count("#view tbody tr") == len(members)
    assert part.engine is not None
    layers = [layer for layer in part.engine.layers if layer.profile == "decode" and {*layer.ops[:1]} & {*members}]
    page.click('[data-tab="engine"]')
    assert layers and page.count("#view tbody tr") == len(layers)
    page.click('[data-tab="layers"]')
    page.click(f'[data-component="{component}"]')
    assert page.count("#view tbody tr") == len(part.ops)


def test_the_profile_changes_all_figures(inspection: Inspection, open_page: OpenPage) -> None:
    page, part = open_page(inspection), inspection.parts[0]
    for profile in ("prefill", "decode"):
        page.click(f'[data-profile="{profile}"]')
        total = part.totals[profile]
        assert total.seconds is not None
        assert as_number(page.text("#step-time strong")) == pytest.approx(total.seconds, rel=0.006)
        step = inspection.profiles[profile].step
        assert f"{step.num_tokens:,} new token" in page.text("#step-time")
        tiles = page.text(".tiles").split("\n")
        shown = dict(zip(tiles[::2], tiles[1::2], strict=True))
        assert as_number(shown["FLOPs"]) == pytest.approx(total.flops, rel=0.006)
        assert as_number(shown["Weights read"]) == pytest.approx(total.weight_bytes, rel=0.006)
        groups: dict[str, float] = {}
        for op in part.ops:
            name = re.sub(r"layers\.\d+\.", "", op.path)
            groups[name] = groups.get(name, 0.0) + op.costs[profile].share
        largest = all_of(page, "#panel .item .line > :last-child", "e.innerText")[:3]
        assert list(map(as_share, largest)) == pytest.approx(sorted(groups.values(), reverse=True)[:3], abs=6e-4)


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


def test_tables_hold_everything_and_sort(inspection: Inspection, open_page: OpenPage) -> None:
    page, part = open_page(inspection), inspection.parts[0]
    assert part.engine is not None
    in_decode = [layer for layer in part.engine.layers if layer.profile == "decode"]
    for tab, rows in {"layers": part.ops, "states": part.states, "weights": part.weights, "engine": in_decode}.items():
        page.click(f'[data-tab="{tab}"]')
        assert page.count("#view tbody tr") == len(rows)
    page.click('[data-tab="layers"]')
    headings = all_of(page, "#view th", "e.innerText")
    for op in (op_with(part, "q4e.moe"), op_with(part, "q4e.gated_delta_rule")):
        cells = dict(zip(headings, all_of(page, f'[data-row="{op.path}"] td', "e.innerText"), strict=True))
        cost = op.costs["decode"]
        figures = {"Roofline": cost.seconds, "Weights": cost.weight_bytes, "States": cost.state_bytes}
        for title, value in {**figures, "FLOPs": cost.flops, "Activations": cost.activation_bytes}.items():
            assert as_number(cells[title]) == pytest.approx(value, rel=0.006, abs=0.5e-9)
        assert as_share(cells["Share"]) == pytest.approx(cost.share, abs=6e-4) and cells["Kind"] == "plugin"
    page.click('[data-tab="weights"]')
    page.click("#view th:nth-child(4) button")
    names = all_of(page, "#view tbody tr", "e.dataset.row")
    sizes = {weight.name: weight.num_bytes for weight in part.weights}
    assert [sizes[name] for name in names] == sorted(sizes.values(), reverse=True)
    shown = all_of(page, "#view tbody td:nth-child(4)", "e.innerText")
    assert list(map(as_number, shown)) == pytest.approx([sizes[name] for name in names], rel=0.006)
    page.click("#view th:nth-child(4) button")
    again = all_of(page, "#view tbody tr", "e.dataset.row")
    assert [sizes[name] for name in again] == sorted(sizes.values())
    ten = replace(part.weights[0], name="layers.10.weight", read_by=[])
    page = open_page(replace(inspection, parts=[replace(part, weights=[ten, *part.weights])]), hash="#tab=weights")
    page.click("#view th:nth-child(1) button")
    names = all_of(page, "#view tbody tr", "e.dataset.row")
    numbers = [int(found[1]) for name in names if (found := re.match(r"layers\.(\d+)\.", name))]
    assert numbers == sorted(numbers) and numbers[-1] == 10


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
    assert len({*facts}) == len(facts)
    page.click("#unfold-all")
    page.click(".op")
    assert page.evaluate("document.getElementById('panel-title').textContent") == hostile
    assert json.dumps(hostile, ensure_ascii=False) in page.evaluate("document.getElementById('panel').textContent")
    page.press("/")
    page.type("<img src=x")
    assert hostile in page.evaluate("document.querySelector('#matches .path').textContent")
    assert page.count("img") == 0


def test_without_engine_and_draft_head(float_inspection: Inspection, open_page: OpenPage) -> None:
    document = float_inspection
    part = document.parts[0]
    assert document.target is None and part.engine is None and len(document.parts) == 1
    page = open_page(document)
    assert page.count("[data-part]") == 0 and "no engine" in page.text(".tiles")
    assert as_number(page.text("#step-time strong")) == pytest.approx(
        part.totals["decode"].weight_bytes + part.totals["decode"].state_bytes, rel=0.006
    )
    assert page.count('[data-measure="time"]') == 0
    page.click("#unfold-all")
    assert page.count(".op") == len(part.ops)
    page.click(".op")
    assert shown_costs(page)["Roofline"] == ["unknown", "unknown"]
    page.click('[data-tab="engine"]')
    assert page.text("#view") == "No engine."
    empty = replace(part, ops=[], states=[], weights=[], components=[], values={}, inputs=[], outputs=[])
    assert open_page(replace(document, parts=[empty])).count(".fold") == 0


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
