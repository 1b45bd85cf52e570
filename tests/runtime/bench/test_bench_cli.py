from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import refusal

from qwen4exp_trt.runtime.bench.__main__ import main, parse_args, settings_of
from qwen4exp_trt.runtime.bench.cases import EFFORTS, Selection
from qwen4exp_trt.runtime.runtime_options import RUNTIME_OPTIONS

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *argv: Any) -> str:
    return refusal(capsys, "qwen4exp-bench", main, *argv)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "argument --batch: '0': integers from 1 on were expected, with commas between"),
        (["--context", "2k"], "argument --context: '2k': integers from 1 on"),
        (["--drafts", "-1"], "argument --drafts: "),
        (["--iterations", "2,3"], "argument --iterations: '2,3': one integer from 1 on was expected"),
        (["--iterations", "0"], "argument --iterations: '0': one integer from 1 on was expected"),
        (["--random-weights", "-1"], "argument --random-weights: "),
        (["--random-weights", str(2**63)], "argument --random-weights: '9223372036854775808': one integer from 0 on"),
        (["--seconds", "nan"], "argument --seconds: 'nan': a number of seconds above 0 was expected"),
        (["--seconds", "0"], "argument --seconds: '0': a number of seconds above 0 was expected"),
        (["--quick", "--full"], "argument --full: not allowed with argument --quick"),
        (["--decode-only", "--prefill-only"], "argument --prefill-only: not allowed with argument --decode-only"),
        (["--json", "nowhere/result.json"], "nowhere/result.json: --json cannot write a file there"),
        (["--json", "."], "--json writes a file, and this is something else"),
        (["--device", "cuda:99"], "device 'cuda:99': "),
        (["--check"], "--check compares with the program executed op by op, which is what the backend 'eager' does"),
        (["--speculate", "much"], "speculative decoding is 'much'; it must be "),
        (["--batch", "9", "--decode-only"], "can be measured: decode of 9 x 2,048 tokens: 3 sequences run at a time, "),
        (["--batch", "9", "--decode-only"], ", at most; nor can 6 others"),
        (["--prompt", "64", "--prefill-only"], "prefill of 64 tokens: takes 65 tokens with those of its steps; the"),
        (["--num-blocks", "0"], "num_blocks is 0; the KV cache needs at least one page"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags(tiny_bundle: Path, capsys: Capture, flags: list[str], message: str) -> None:
    assert message in refused(capsys, tiny_bundle, *flags)


def test_bad_bundle(tmp_path: Path, capsys: Capture) -> None:
    assert "no such folder; give a bundle that qwen4exp-build made" in refused(capsys, tmp_path / "absent")
    assert "the following arguments are required: bundle" in refused(capsys)


def test_help_names_every_option(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--help"])
    text = capsys.readouterr().out
    own = ("--json FILE", "--quick", "--full", "--decode-only", "--prefill-only", "--batch", "--context", "--prompt")
    more = ("--drafts", "--iterations N", "--seconds S", "--check", "--random-weights", "--host-name")
    assert [flag for flag in (*own, *more, *(option.flag for option in RUNTIME_OPTIONS)) if flag not in text] == []


def test_settings() -> None:
    args = [
        "b",
        "--full",
        "--decode-only",
        "--batch",
        "1,3",
        "--iterations",
        "5",
        "--random-weights",
        "--num-blocks",
        "9",
    ]
    settings = settings_of(parse_args(args))
    assert settings.effort_name == "full" and settings.effort.contexts == EFFORTS["full"].contexts
    assert (settings.effort.iterations, settings.effort.warm_up) == (5, 5)
    assert settings.selection == Selection(prefill=False, generate=False, batches=(1, 3))
    assert settings.random_seed == 0 and settings.llm_options == {"num_blocks": 9}
    default = settings_of(parse_args(["b", "--seconds", "0.5", "--random-weights", "7"]))
    assert default.selection == Selection() and default.random_seed == 7
    assert default.effort == settings_of(parse_args(["b", "--seconds", "0.5"])).effort
    assert default.effort.seconds == 0.5
