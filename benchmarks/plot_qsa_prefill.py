"""Draws how QSA's time grows with the prompt, from the newest results of `qsa_prefill.py`.

    python benchmarks/plot_qsa_prefill.py docs/qsa_prefill.svg

Both axes are logarithmic. Beside the sum of the three ops stand attention and selection alone, and torch's dense flash
attention.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "qsa_prefill.jsonl"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 440, 70, 50, 30, 190
LINES = {
    ("clustered", "milliseconds"): ("all, clustered", "#1f6feb", ""),
    ("clustered", "attention"): ("attention, clustered", "#1f6feb", "6 4"),
    ("random", "milliseconds"): ("all, random", "#d1242f", ""),
    ("random", "attention"): ("attention, random", "#d1242f", "6 4"),
    ("clustered", "select"): ("selection", "#1a7f37", ""),
    ("clustered", "flash"): ("torch's dense flash attention", "#6e7781", ""),
}
"""Kind and field of a result: label, color and dashes."""

Point = tuple[float, float]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Draw the times of QSA over the length of the prompt.")
    parser.add_argument("out", type=Path, help="SVG to write")
    args = parser.parse_args(argv)
    newest = {(line["kind"], line["tokens"]): line for line in map(json.loads, RESULTS.read_text().splitlines())}
    lines = {
        (kind, field): sorted(
            (line["tokens"], line[field]) for line in newest.values() if line["kind"] == kind and field in line
        )
        for kind, field in LINES
    }
    args.out.write_text(draw(lines), encoding="utf-8")
    return 0


def draw(lines: dict[tuple[str, str], list[Point]]) -> str:
    """The SVG of points (tokens, milliseconds)."""
    points = [point for line in lines.values() for point in line]
    ticks_x = sorted({x for x, _ in points})
    ticks_y = [10.0**e for e in range(math.floor(math.log10(min(y for _, y in points))), 4)]
    low, high = (min(ticks_x), min(ticks_y)), (max(ticks_x), max(y for _, y in points))

    def place(point: Point) -> Point:
        x, y = (math.log(v / a) / math.log(b / a) for v, a, b in zip(point, low, high, strict=True))
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - BOTTOM - TOP)

    font = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><text x="{LEFT}" y="16">ms, one layer</text>')
    for tick in ticks_x:
        x, _ = place((tick, low[1]))
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tick // 1024:.0f}k</text>')
    for tick in (t for t in ticks_y if t <= high[1]):
        _, y = place((low[0], tick))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for index, (key, (label, color, dashes)) in enumerate(LINES.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, lines[key]))
        style = f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{path}" {style}/>')
        y = TOP + 20 * index
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {y}h24" {style}/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 42}" y="{y + 4}">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">tokens of the prompt</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
