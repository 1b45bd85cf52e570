from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal

from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.evaluate_command import main, parse_args
from qwen4exp_trt.runtime.evaluation import evaluate

Capture = pytest.CaptureFixture[str]

TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def refused(capsys: Capture, *argv: Any) -> str:
    return refusal(capsys, "qwen4exp-eval", main, *argv)


def test_prints_the_result(tiny_bundle: Path, llm: LLM, text: Path, capsys: Capture) -> None:
    assert main([str(tiny_bundle), str(text), "--window", "8", "--max-tokens", "14"]) == 0
    out, err = capsys.readouterr()
    perplexity = evaluate(llm, TEXT, window=8, max_tokens=14).perplexity
    assert out.splitlines() == [f"{'tokens':<22}12 in 2 windows of 8", f"{'perplexity':<22}{perplexity:.4f}"]
    assert re.fullmatch(r"window 2 of 2, \d+ s, 0 s left\n", err)


def test_against_another_bundle(tiny_bundle: Path, llm: LLM, text: Path, tmp_path: Path, capsys: Capture) -> None:
    other, file = shutil.copytree(tiny_bundle, tmp_path / "other"), tmp_path / "result.json"
    assert main([str(tiny_bundle), str(text), "--against", str(other), "--json", str(file)]) == 0
    rows = {line[:20].strip(): line[22:] for line in capsys.readouterr().out.splitlines()}
    assert list(rows) == ["tokens", "perplexity", "KL(base || this)", "top-1 agreement"]
    assert re.fullmatch(r"(\d+\.\d{4}), \+0\.000% from the base's \1", rows["perplexity"])
    assert rows["KL(base || this)"] == "mean 0.000000, 99.9th percentile 0.000000 nats"
    assert rows["top-1 agreement"] == "100.000%"
    names = {"bundle": str(tiny_bundle), "text": str(text), "against": str(other)}
    assert json.loads(file.read_text()) == names | asdict(evaluate(llm, TEXT, base=llm))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "result.json", "text.txt"]


def test_a_failed_write_leaves_the_old_file(
    tiny_bundle: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "result.json").write_text("old")
    monkeypatch.setattr(Path, "replace", fail)
    assert main([str(tiny_bundle), str(text), "--json", str(tmp_path / "result.json")]) == 2
    assert "result.json: cannot write the result: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "result.json").read_text() == "old"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--window", "65"], "the window is 65 tokens; it must have 2 to 64, the max_seq_len of the bundle"),
        (["--window", "0"], "the window is 0 tokens"),
        (["--window", "wide"], "argument --window: invalid int value: 'wide'; see qwen4exp-eval --help"),
        (["--max-tokens", "-1"], "max_tokens is -1; a text needs two tokens"),
        (["--json", "nowhere/result.json"], "nowhere/result.json: --json cannot write a file there"),
        (["--json", "."], "--json writes a file, and this is something else"),
        (["--json", "n" * 300], "--json cannot write a file there: File name too long"),
        (["--against", "nowhere"], "nowhere: no such folder; give a bundle that qwen4exp-build made"),
        (["--against-checkpoint", "nowhere"], "--against-checkpoint needs --against"),
        (["--checkpoint", "nowhere"], "nowhere: no such folder; give the one that holds the *.safetensors files"),
        (["--device", "cuda:99"], "device 'cuda:99': "),
        (["--backend", "nonsense"], "argument --backend: invalid choice: 'nonsense'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags(tiny_bundle: Path, text: Path, capsys: Capture, flags: list[str], message: str) -> None:
    assert message in refused(capsys, tiny_bundle, text, *flags)


def test_bad_text(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "text.txt"
    assert "text.txt: cannot read the text: No such file or directory" in refused(capsys, tiny_bundle, path)
    path.write_bytes(b"caf\xe9 au lait")
    assert "text.txt: the text is not UTF-8: 'utf-8' codec can't decode byte 0xe9" in refused(capsys, tiny_bundle, path)
    path.write_text("")
    assert "the text has 0 tokens; it needs two" in refused(capsys, tiny_bundle, path)


def test_bad_bundle(text: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "no such folder; give a bundle that qwen4exp-build made" in refused(capsys, tmp_path / "absent", text)
    assert "the following arguments are required: text" in refused(capsys, tmp_path)


def test_help_names_every_flag_and_default(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    flags = ("--against BUNDLE", "--window N", "--max-tokens N", "--json FILE", "--backend", "--device", "--checkpoint")
    for part in (
        *flags,
        "(default: 512, or",
        "(default: all)",
        "(default: eager)",
        "(default: cpu, and cuda for an engine)",
    ):
        assert part in text
