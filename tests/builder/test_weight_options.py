"""``qwen4exp-build`` and the formats of weights: what it refuses, prints, converts and finds again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build_command import FLOAT32, Capture, refused, tree

from qwen4exp_trt.builder import __main__ as command_module
from qwen4exp_trt.builder import build as build_module
from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime import LLM, progress_line
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.progress_line import ProgressLine

W4A4 = ["--precision", "nvfp4-w4a4", "--calibration", "TEXT"]

BAD_OPTIONS: dict[str, str] = {
    "--precision fp8": "argument --precision: invalid choice: 'fp8'",
    "--ple fp8": "argument --ple: invalid choice: 'fp8'",
    "--activation-dtype float16": "argument --activation-dtype: invalid choice: 'float16'",
    "--kv-cache-dtype bf16": "argument --kv-cache-dtype: invalid choice: 'bf16' (choose from 'auto', 'fp8')",
    "--ple-residency tape": "argument --ple-residency: invalid choice: 'tape'",
    "--keep": "argument --keep: expected one argument",
    "--precision nvfp4-w4a4": "--calibration is missing; give a text for --precision nvfp4-w4a4",
    "--calibration TEXT": "--calibration is given with --precision checkpoint; give a text for --precision nvfp4-w4a4",
    "--calibration TEXT --precision nvfp4": "--calibration is given with --precision nvfp4; give a text",
    "--precision nvfp4-w4a4 --calibration TEXT --config-only": "for which --config-only has no weights",
    "--keep layers.9.*": "--keep 'layers.9.*' matches no weight; the pattern is for names such as lm_head.weight, l",
    "--keep lm_head.* --keep LM_HEAD.*": "--keep 'LM_HEAD.*' matches no weight",
    "--weights-dir OUTPUT --precision nvfp4": "bundle, which a build replaces; choose a folder beside it with",
    "--weights-dir OUTPUT/inside": "inside, where converted weights would be kept, is in the bundle",
    "--weights-dir CHECKPOINT": "--weights-dir is the checkpoint",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog", encoding="utf-8")
    return path


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.items(), ids=BAD_OPTIONS)
def test_bad_options(checkpoint: Path, text: Path, tmp_path: Path, capsys: Capture, options: str, message: str) -> None:
    output = tmp_path / "bundle"
    for name, path in (("TEXT", text), ("OUTPUT", output), ("CHECKPOINT", checkpoint)):
        options = options.replace(name, str(path))
    assert message in refused(capsys, tmp_path, checkpoint, "-o", output, *FLOAT32, *options.split())


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("precision", "fp8", "checkpoint, nvfp4, nvfp4-w4a4, bf16"),
        ("ple", "nvfp4-w4a4", "checkpoint, nvfp4, bf16"),
        ("activation_dtype", "float16", "bfloat16, float32"),
        ("kv_cache_dtype", "float8_e4m3fn", "auto, fp8"),
        ("ple_residency", "tape", "device, host, disk"),
    ],
)
def test_bad_values_from_python(tmp_path: Path, field: str, value: str, choices: str) -> None:
    options = replace(BuildOptions(checkpoint=tmp_path, output=tmp_path / "bundle"), **{field: value})
    with pytest.raises(BuildError, match=f"--{field.replace('_', '-')} is '{value}'; it must be one of {choices}"):
        options.check()


# --- the calibration text --------------------------------------------------------------------------------------------

BAD_TEXTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: path.unlink(), "text.txt: cannot read the text: No such file or directory"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "text.txt: cannot read the text: Is a directory"),
    "not UTF-8": (lambda path: path.write_bytes(b"\xff\xfe"), "text.txt: the text is not UTF-8"),
    "empty": (lambda path: path.write_text(""), "text.txt: the text has 0 tokens; calibration needs at least two"),
    "one token": (lambda path: path.write_text("a"), "text.txt: the text has 1 tokens; calibration needs at least"),
}


@pytest.mark.parametrize(("damage", "message"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_bad_calibration_text_is_found_before_weights_are_converted(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: Capture, damage: Callable[[Path], Any], message: str
) -> None:
    damage(text)
    argv = [str(text) if arg == "TEXT" else arg for arg in W4A4]
    assert message in refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle", *FLOAT32, *argv)


def test_calibration_needs_a_tokenizer(damaged: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    (damaged / "tokenizer.json").unlink()
    argv = [str(text) if arg == "TEXT" else arg for arg in W4A4]
    message = refused(capsys, tmp_path, damaged, "-o", tmp_path / "bundle", *FLOAT32, *argv)
    assert "text.txt: to read it the checkpoint needs a tokenizer.json, which it lacks" in message


# --- the folder of converted weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "below"])
def test_weights_dir_that_is_a_file(checkpoint: Path, tmp_path: Path, capsys: Capture, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    argv = ["--precision", "nvfp4", "--weights-dir", tmp_path / "file" / below]
    message = refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle", *FLOAT32, *argv)
    assert re.search(r"file(/below)?: cannot write the converted weights: .*/file is not a folder", message)


def test_weights_dir_that_is_not_writable(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere
    argv = ["--precision", "nvfp4", "--weights-dir", tmp_path / "there"]
    message = refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle", *FLOAT32, *argv)
    assert "there: cannot write the converted weights: [Errno 13] Permission denied" in message


def test_weights_dir_in_another_place(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    """A relative path too; the second build finds every file, and both bundles load."""
    elsewhere = tmp_path / "elsewhere" / "weights"
    argv = [str(checkpoint), *FLOAT32, "--precision", "nvfp4", "--weights-dir", str(elsewhere)]
    lines = []
    for name in ("first", "second"):
        assert main([*argv, "-o", str(tmp_path / "out" / name)]) == 0
        out = capsys.readouterr().out
        (line,) = [line for line in out.splitlines() if line.startswith("converted weights ")]
        lines.append(line)
        assert ("\nconvert  " in out) == (name == "first")
        assert LLM(tmp_path / "out" / name).score([5, 6, 7]).isfinite().all()
    ref = Manifest.load(tmp_path / "out" / "first").converted
    assert ref is not None and ref.path == str(elsewhere)
    assert sorted(ref.files) == sorted(path.name for path in elsewhere.iterdir())
    count = len(ref.files)
    first = rf"converted weights +0 of {count} files are in {elsewhere}, \d+\.\d\d KiB to write, \d+\.\d\d GiB free"
    assert re.fullmatch(first, lines[0])
    assert re.fullmatch(rf"converted weights +{count} of {count} files are in {elsewhere}", lines[1])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["first", "second"]


# --- what is printed -------------------------------------------------------------------------------------------------


@pytest.fixture
def shown_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress lines of tasks that are as short as those of tests."""
    monkeypatch.setattr(command_module, "ProgressLine", lambda describe, quiet_seconds: ProgressLine(describe))


def test_a_w4a4_build_prints_every_step(
    shown_progress: None, checkpoint: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = [str(text) if arg == "TEXT" else arg for arg in W4A4]
    options = ["--ple", "nvfp4", "--keep", "lm_head.*", "--keep", "layers.0.mlp.*", "--kv-cache-dtype", "fp8"]
    assert main([str(checkpoint), "-o", str(tmp_path / "bundle"), *FLOAT32, *argv, *options]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"(100%, \d+ s, 0 s left\n){3}", err), "of the conversion, the loading and the calibration"
    plan, weights, steps, report = out.split("\n\n")[1:]
    assert "n-gram table nvfp4 on device, activations float32, KV cache float8_e4m3fn" in plan
    rows = [re.sub(r" {2,}", "  ", line).strip() for line in weights.splitlines()]
    assert "n-gram table  1  0.00 M  float -> nvfp4 (converted)" in rows
    assert "lm_head  1  0.01 M  float32 (--keep lm_head.*)" in rows
    assert "routed experts  2  0.01 M  float32 (--keep layers.0.mlp.*)" in rows
    assert "routed experts  2  0.01 M  float -> nvfp4 (converted)" in rows
    names = [line[:20].strip() for line in steps.splitlines()]
    assert names == ["converted weights", "convert", "load", "calibrate", "export", "passes", "lower", "write"]
    precision = "nvfp4-w4a4, n-gram table nvfp4 on device, activations float32, KV cache float8_e4m3fn"
    assert f"precision             {precision}\n" in report
    manifest = Manifest.load(tmp_path / "bundle")
    assert manifest.calibration is not None
    paths = ["layers.0.linear_attn.in_proj_qkv_in_proj_z", "layers.0.linear_attn.out_proj.nvfp4_linear"]
    paths += ["layers.1.self_attn.q_proj_k_proj_v_proj", "layers.1.self_attn.o_proj.nvfp4_linear"]
    assert list(manifest.calibration.scales) == paths


def test_a_terminal_keeps_the_name_of_a_stage_with_progress(
    shown_progress: None, checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(progress_line, "_SECONDS_BETWEEN_UPDATES", 0.0)  # the conversion may end within one
    argv = [str(checkpoint), "-o", str(tmp_path / "bundle"), *FLOAT32, "--precision", "nvfp4"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert re.search(r"\r\d+%, .*\r100%, \d+ s, 0 s left\033\[K\n", err, re.DOTALL)
    assert re.search(r"\nconvert {15}\r\033\[Kconvert {15}\d\.\d s\n", out)
    assert out.count("\r") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()], ids=lambda error: type(error).__name__)
def test_converted_files_stay_for_the_next_build(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    argv = [str(checkpoint), "-o", str(tmp_path / "bundle"), *FLOAT32, "--precision", "nvfp4"]
    with monkeypatch.context() as patched:
        patched.setattr(build_module, "compile_program", fail)
        if isinstance(error, KeyboardInterrupt):
            assert main(argv) == 130
        else:
            with pytest.raises(ZeroDivisionError):
                main(argv)
    left = tree(tmp_path)
    assert left and {name.partition("/")[0] for name in left} == {"converted-weights"}
    capsys.readouterr()
    assert main(argv) == 0
    assert "\nconvert  " not in capsys.readouterr().out
    assert tree(tmp_path).items() >= left.items()
