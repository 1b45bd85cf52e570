"""The figures of the page of ``qwen4exp-inspect --html``, in a headless browser, against the document."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import pytest
from browser import Page
from inspection_page import OpenPage, all_of, op_with, panel_title

from qwen4exp_trt.builder.inspection.document import CostInfo, Inspection

pytestmark = pytest.mark.trt


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
    facts = all_of(page, "#facts dt", "e.textContent")
    assert len({*facts}) == len(facts)  # those of both engines can be told apart
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
