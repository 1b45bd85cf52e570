"""What ``qwen4exp-build`` refuses, and what it prints."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build_command import FLOAT32, STAGES, Capture, refused
from safetensors.torch import load_file, save_file

from qwen4exp_trt.builder.__main__ import main, parse_args
from qwen4exp_trt.builder.options import BuildOptions

# --- bad checkpoints -------------------------------------------------------------------------------------------------


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def lose_a_shard(folder: Path) -> None:
    weight_map = {"a": "model.safetensors", "b": "model-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no such folder": (lambda folder: shutil.rmtree(folder), "checkpoint: no such folder; give the folder that holds"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "config.json: cannot be read: No such file or directory",
    ),
    "config not JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: not a JSON file"),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json: holds a list"),
    "wrong model_type": (edit_config(model_type="qwen3_next"), "model_type is 'qwen3_next'; it must be one of"),
    "no tensors": (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors file in it"),
    "truncated": (truncate, "model.safetensors: truncated or damaged:"),
    "missing shard": (
        lose_a_shard,
        "1 of the 2 shards that model.safetensors.index.json names are missing: model-0000",
    ),
    "tensor missing": (
        edit_tensors(lambda tensors: tensors.pop("lm_head.weight")),
        "does not match its config. missing (1): lm_head.weight",
    ),
    "tensor of another shape": (
        edit_tensors(lambda tensors: tensors.update({"lm_head.weight": torch.zeros(383, 32)})),
        "does not match its config. wrong shape (1): lm_head.weight [383, 32] instead of [384, 32]",
    ),
    "unknown tensor": (
        edit_tensors(lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)})),
        "does not match its config. unexpected (1): model.extra.weight",
    ),
    "damaged chat template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"),
        "chat_template.jinja: the template 'default' has a syntax error in line 1",
    ),
    "damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        "tokenizer.json is not a tokenizer that the tokenizers library can read",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_bad_checkpoint(damaged: Path, capsys: Capture, damage: Callable[[Path], Any], message: str) -> None:
    damage(damaged)
    assert message in refused(capsys, damaged.parent, damaged, "-o", damaged.parent / "new" / "bundle", *FLOAT32)


# --- bad options -----------------------------------------------------------------------------------------------------

BAD_OPTIONS: dict[str, str] = {
    "--max-seq-len 4097": "--max-seq-len is 4097, the model's max_position_embeddings allows 4096",
    "--block-size 6": "--block-size is 6; it must be a multiple of the model's indexer_compress_ratio 4",
    "--verify --config-only": "--verify executes the program with its weights, which --config-only does not read",
    "--target banana": "--target is 'banana', but a bundle with float32 activations has no engine; leave it",
    "--target sm121": "--target is 'sm121', but a bundle with float32 activations has no engine; leave it",
    "--precision float16": "argument --precision: invalid choice: 'float16'",
    "--backend cuda": "argument --backend: invalid choice: 'cuda'",
    "--max-seq-len long": "argument --max-seq-len: invalid int value: 'long'; see qwen4exp-build --help",
    "--unknown": "unrecognized arguments: --unknown",
} | {
    f"--{name.replace('_', '-')} {value}": f"{name} is {value}; it must be an integer from 1 to "
    for name in ("max_batch_size", "max_seq_len", "prefill_chunk", "block_size")
    for value in (0, -4)
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.items(), ids=BAD_OPTIONS)
def test_bad_options(checkpoint: Path, tmp_path: Path, capsys: Capture, options: str, message: str) -> None:
    argv = [checkpoint, "-o", tmp_path / "bundle", "--activation-dtype", "float32", *options.split()]
    assert message in refused(capsys, tmp_path, *argv)


def test_missing_output(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "the following arguments are required: -o/--output" in refused(capsys, tmp_path, checkpoint)


@pytest.mark.trt
@pytest.mark.parametrize("target", ["sm999", "gb10", ""])
def test_impossible_target(checkpoint: Path, tmp_path: Path, capsys: Capture, target: str) -> None:
    message = refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle", "--target", target)
    assert f"target '{target}' is not one that tensorrt_rtx" in message
    assert "choose one of " in message and "sm121" in message


def test_bad_output(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")
    for output, message in {
        "file": "file exists and is not a bundle, so it is not overwritten",
        "full": "full exists and is not a bundle",
        "file/below": "file is not a folder; choose another folder",
    }.items():
        assert message in refused(capsys, tmp_path, checkpoint, "-o", tmp_path / output, *FLOAT32)


def test_output_that_is_not_writable(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable; choose another folder" in refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle")


# --- what is printed -------------------------------------------------------------------------------------------------


def test_progress_and_table(bundle: Path, checkpoint: Path, capsys: Capture) -> None:
    capsys.readouterr()
    options = ["--max-batch-size", "2", "--max-seq-len", "64", "--block-size", "8", "--prefill-chunk", "8"]
    assert main([str(checkpoint), "-o", str(bundle), *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    config, plan, weights, rest, table = out.split("\n\n")
    assert plan.startswith("plan  ") and " an estimate; the engine build tells" in plan
    assert weights.startswith("weights  ") and "\n  routed experts  " in weights
    progress = f"{config}\n{rest}"
    assert [re.fullmatch(r"(\w+) +\d+\.\d s", line)[1] for line in progress.splitlines()] == STAGES  # type: ignore[index]
    rows = {line[:20].strip(): line[22:] for line in table.splitlines()}
    names = [
        "bundle",
        "engine",
        "draft head",
        "kernels",
        "precision",
        "weights",
        "states",
        "memory",
        "step",
        "passes",
        "time",
    ]
    assert list(rows) == names
    assert rows["bundle"] == str(bundle)
    assert rows["engine"] == "0.00 MiB for sm121, by tensorrt-rtx"
    assert re.fullmatch(r"\d+ for sm121, \d+\.\d\d MiB", rows["kernels"])
    assert re.fullmatch(r"\d+\.\d MiB in \d+ tensors", rows["weights"])
    assert re.fullmatch(r"\d+\.\d MiB for a sequence of 64 tokens", rows["states"])
    assert re.fullmatch(r"2\.\d\d GiB, fits: 114\.00 GiB usable", rows["memory"])
    assert rows["step"] == "at most 2 sequences, 16 tokens"
    assert re.fullmatch(r"(\w+ \d+, )*\w+ \d+", rows["passes"])
    assert re.fullmatch(r"\d+\.\d s", rows["time"])


def test_a_failure_ends_the_line_of_its_stage(damaged: Path, capsys: Capture) -> None:
    truncate(damaged)
    assert main([str(damaged), "-o", str(damaged.parent / "bundle"), *FLOAT32]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("config ")
    assert lines[-1].split() == ["checkpoint", "failed"]


def test_help_names_every_flag_and_default(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.replace("-\n", "-").split())
    for name in BuildOptions.__dataclass_fields__:
        assert name == "checkpoint" or f"--{name.replace('_', '-')}" in text
    for default in ("sm121, GB10", "bfloat16", "rtx", "8", "the model's limit", "2048, or", "64", "no"):
        assert re.search(rf"\(default: ([\w-]*-\s*)?{default}", text), default
