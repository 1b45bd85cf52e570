from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen4exp_trt.runtime.bench.__main__ import main, parse_args, settings_of
from qwen4exp_trt.runtime.bench.cases import EFFORTS, Selection
from qwen4exp_trt.runtime.runtime_options import RUNTIME_OPTIONS

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *argv: Any) -> str:
    """The one line on stderr of a command that exits with 2 and prints nothing else."""
    try:
        code = main([str(arg) for arg in argv])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("qwen4exp-bench: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "argument --batch: '0': integers from 1 on were expected, with commas between"),
        (["--context", "2k"], "argument --context: '2k': integers from 1 on"),
        (["--drafts", "-1"], "argument --drafts: "),
        (["--iterations", "2,3"], "argument --iterations: '2,3': one integer from 1 on was expected"),
        (["--seconds", "0"], "argument --seconds: '0': a number of seconds above 0 was expected"),
        (["--quick", "--full"], "argument --full: not allowed with argument --quick"),
        (["--decode-only", "--prefill-only"], "argument --prefill-only: not allowed with argument --decode-only"),
        (["--json", "nowhere/result.json"], "nowhere/result.json: --json cannot write a file there"),
        (["--json", "."], "--json writes a file, and this is something else"),
        (["--device", "cuda:99"], "device 'cuda:99': "),
        (["--check"], "--check compares with the program executed op by op, which is what the backend 'eager' does"),
        (["--speculate", "much"], "speculative decoding is 'much'; it must be "),
        (["--num-blocks", "0"], "num_blocks is 0; the KV cache needs at least one page"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags(tiny_bundle: Path, capsys: Capture, flags: list[str], message: str) -> None:
    try:
        code = main([str(tiny_bundle), *flags])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("qwen4exp-bench: error: ") and message in last
    assert all(line.startswith("[") for line in err.splitlines()[:-1]), "nothing but progress in front"


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
