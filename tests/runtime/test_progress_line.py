from __future__ import annotations

import sys

import pytest

from qwen4exp_trt.runtime import progress_line as module
from qwen4exp_trt.runtime.progress_line import ProgressLine, loading_line

Capture = pytest.CaptureFixture[str]


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return clock


def test_a_line_now_and_then_and_one_at_the_end(clock: Clock, capsys: Capture) -> None:
    line = ProgressLine(lambda done, total: f"window {done} of {total}")
    for done in range(1, 9):
        clock.now += 4
        line.show(done, 8)
    assert capsys.readouterr().err.splitlines() == [
        "window 3 of 8, 12 s, 20 s left",
        "window 6 of 8, 24 s, 8 s left",
        "window 8 of 8, 32 s, 0 s left",
    ]


def test_a_terminal_rewrites_the_line(clock: Clock, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = ProgressLine(lambda done, total: f"{done}/{total}")
    for done in (1, 2):
        clock.now += 1
        line.show(done, 2)
    assert capsys.readouterr().err == "\r1/2, 1 s, 1 s left\033[K\r2/2, 2 s, 0 s left\033[K\n"


def test_a_terminal_is_not_flooded(clock: Clock, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = ProgressLine(lambda done, total: "x")
    for done in range(1, 1001):
        clock.now += 0.001
        line.show(done, 1000)
    assert capsys.readouterr().err.count("\r") <= 11


def test_quick_loading_shows_nothing(clock: Clock, capsys: Capture) -> None:
    line = loading_line()
    for done in (1, 2, 3):
        clock.now += 0.5
        line.show(done, 3)
    assert capsys.readouterr().err == ""


def test_slow_loading_is_shown_to_its_end(clock: Clock, capsys: Capture) -> None:
    line, gib = loading_line(), 2**30
    for done in (1, 2, 3):
        clock.now += 11
        line.show(done * gib, 4 * gib)
    clock.now += 0.1
    line.show(4 * gib, 4 * gib)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loaded 1.0 of 4.0 GiB, 11 s, 33 s left"
    assert lines[-1] == "loaded 4.0 of 4.0 GiB, 33 s, 0 s left"
