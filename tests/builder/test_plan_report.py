"""What ``--plan`` prints, and a build before it starts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import pytest
from build_command import FLOAT32, Capture, refused
from plan_requests import plan_request, released_plan
from quantized_checkpoints import write_quantized
from released_model import CONVERTED_TO_NVFP4, RELEASED_CONFIG

from qwen4exp_trt.builder import plan as plan_module
from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.engine import EngineBuild
from qwen4exp_trt.builder.plan import DEVICES, PleResidency, make_plan
from qwen4exp_trt.builder.plan_report import describe_misfit, format_plan
from qwen4exp_trt.runtime.specs import TensorSpec


def plan_rows(out: str) -> dict[str, str]:
    """The rows of the plan, which ends before the first empty line."""
    plan, _, _ = out.partition("\n\n")
    return {line[:22].strip(): line[22:].strip() for line in plan.splitlines()}


def test_options_and_formats() -> None:
    """A component has a row for each format."""
    request = plan_request(CONVERTED_TO_NVFP4, kv_cache_dtype="float8_e4m3fn")
    on_disk = replace(request, precision="nvfp4", ple_residency=PleResidency.DISK)
    text = format_plan(make_plan(on_disk))
    rows = plan_rows(text)
    assert rows["plan"] == "sm121 (GB10), 1 sequence of 2,051 tokens"
    assert rows["options"] == (
        "precision nvfp4, n-gram table checkpoint on disk, activations bfloat16, KV cache float8_e4m3fn"
    )
    formats = [line.split()[-1] for line in text.splitlines() if line.startswith("  linear attention ")]
    assert formats == ["bfloat16", "nvfp4"]
    assert rows["n-gram table"].split(maxsplit=4) == ["0", "B", "2.56", "kB", "fp8, 47.68 GiB on disk"]
    assert rows["n-gram rows"].split(maxsplit=2) == ["74.00", "MiB", "from disk: of one step, and the last ones read"]
    assert rows["draft_rows"].split() == ["9.11", "MiB", "0", "B"]
    on_device = plan_rows(format_plan(make_plan(replace(on_disk, ple_residency=PleResidency.DEVICE))))
    assert on_device["n-gram table"].split() == ["47.68", "GiB", "2.56", "kB", "fp8"]
    assert "n-gram rows" not in on_device


def test_debug_outputs_are_in_the_total() -> None:
    """With fewer tokens in a step they take less; one that makes the plan not fit is said to."""
    marked = tuple(TensorSpec(f"value_{i}", ("T", 2**10), "bfloat16") for i in range(6))
    plan = released_plan({})
    more = plan.with_debug_outputs(marked)
    assert more.total_bytes - plan.total_bytes == more.debug_bytes == 6 * 2048 * 2**11
    assert plan_rows(format_plan(more))["debug outputs"] == "24.00 MiB                  6 plugin inputs that are marked"
    assert "debug outputs" not in plan_rows(format_plan(plan))
    limits = replace(plan.request.limits, prefill_chunk=64)
    assert make_plan(replace(more.request, limits=limits)).debug_bytes == more.debug_bytes / 32
    huge = plan.with_debug_outputs((TensorSpec("huge", ("T", 2**25), "bfloat16"),))
    said = describe_misfit(huge)
    assert said is not None and "128.00 GiB of it is what --mark-plugin-inputs marks: give it patterns that" in said


def test_activation_memory_is_that_of_one_profile() -> None:
    assert EngineBuild(b"", {"activation_bytes": {"decode": 3, "prefill": 7}}).activation_bytes == 7
    assert EngineBuild(b"", {"activation_bytes": {}}).activation_bytes is None
    plan = released_plan({})
    assert plan_rows(format_plan(plan))["activations"].split(maxsplit=2)[2] == "an estimate; the engine build tells"
    assert plan_rows(format_plan(plan.with_activations(7 * 2**20)))["activations"].split(maxsplit=2) == [
        "7.00",
        "MiB",
        "of the engine",
    ]


def test_plan_that_does_not_fit(tmp_path: Path, capsys: Capture) -> None:
    assert main([str(RELEASED_CONFIG), "--plan", "-o", str(tmp_path / "bundle")]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("qwen4exp-build: error: precision checkpoint needs ") and err.count("\n") == 1
    rows = plan_rows(out)
    assert rows["plan"] == "sm121 (GB10), 8 sequences of 262,144 tokens"
    assert rows["routed experts"].split() == ["225.00", "GiB", "4.72", "GB", "bfloat16"]
    assert rows["kv_cache"].split() == ["6.00", "GiB", "50.43", "MB"]
    assert re.match(r"\d{3}\.\d\d MiB +an estimate", rows["activations"])
    assert re.match(r"2\d\d\.\d\d MiB +of the activations, at most", rows["workspace"])
    assert re.match(r"at most 16\.9 tokens/s: 13\.83 GB for a token of one sequence at 262,144 tokens", rows["decode"])
    assert rows["decode"].endswith("over the 233 GB/s that others measured on a GB10")
    assert not list(tmp_path.iterdir())


def test_plan_that_fits(checkpoint: Path, capsys: Capture) -> None:
    assert main([str(checkpoint), "--plan", "--max-batch-size", "1", "--max-seq-len", "64"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and plan_rows(out)["plan"] == "sm121 (GB10), 1 sequence of 64 tokens"
    assert " fits: 114.00 GiB usable\n" in out


def test_plan_without_an_engine_or_of_an_unknown_target(checkpoint: Path, capsys: Capture) -> None:
    assert main([str(checkpoint), "--plan", *FLOAT32]) == 0
    out = capsys.readouterr().out
    assert plan_rows(out)["plan"] == "no engine, 2 sequences of 64 tokens" and "usable" not in out
    assert plan_rows(out)["options"].endswith("activations float32, KV cache float32")
    assert main([str(RELEASED_CONFIG), "--plan", "--target", "sm90"]) == 0
    out = capsys.readouterr().out
    assert "the memory of sm90 is not known" in out and "tokens/s" not in out


NOT_READ = "its files are not read: every weight is taken to be stored in float, none quantized"


def formats_of(out: str, component: str) -> list[str]:
    """The formats in the rows of a component, first in the plan, then in the table of weights."""
    return [line.split("  ")[-1].strip() for line in out.splitlines() if line.startswith(f"  {component}  ")]


def test_plan_of_a_quantized_checkpoint_has_the_formats_of_its_files(tmp_path: Path, capsys: Capture) -> None:
    write_quantized(tmp_path, "FP8", bundles.config_dict())
    argv = [str(tmp_path), "--plan", *FLOAT32]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "checkpoint" not in plan_rows(out)
    assert formats_of(out, "routed experts") == ["fp8 blocks", "fp8 blocks"]
    assert formats_of(out, "n-gram table") == ["fp8", "fp8"]
    assert main([*argv, "--precision", "nvfp4", "--ple", "bf16"]) == 0
    out = capsys.readouterr().out
    assert formats_of(out, "routed experts") == ["nvfp4", "fp8 blocks -> nvfp4 (converted)"]
    assert formats_of(out, "n-gram table") == ["float32", "fp8 -> float32 (dequantized)"]


def test_plan_without_files_says_what_it_takes_the_formats_to_be(tmp_path: Path, capsys: Capture) -> None:
    """Of a folder with a config alone, and of the path of a config, even beside files."""
    write_quantized(tmp_path, "FP8", bundles.config_dict())
    places = [tmp_path / "config.json", tmp_path]
    for place in places:
        assert main([str(place), "--plan", *FLOAT32]) == 0
        out = capsys.readouterr().out
        assert plan_rows(out)["checkpoint"] == NOT_READ
        assert formats_of(out, "routed experts") == ["float32", "float32"]
        for path in tmp_path.glob("*.safetensors"):
            path.unlink()


def test_a_build_from_a_config_says_what_it_takes_the_formats_to_be(
    quick: None, checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main([str(checkpoint), "-o", str(tmp_path / "bundle"), "--config-only", *FLOAT32]) == 0
    assert f"\ncheckpoint              {NOT_READ}\n" in capsys.readouterr().out


def test_plan_of_a_damaged_checkpoint_is_refused(tmp_path: Path, capsys: Capture) -> None:
    write_quantized(tmp_path, "FP8", bundles.config_dict())
    (tmp_path / "model-0.safetensors").unlink()
    assert "does not match its config. missing (" in refused(capsys, tmp_path, tmp_path, "--plan", *FLOAT32)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-seq-len", "4097"], "--max-seq-len is 4097, the model's max_position_embeddings allows 4096"),
        (["--block-size", "6"], "--block-size is 6; it must be a multiple"),
        (["--max-batch-size", "0"], "max_batch_size is 0; it must be an integer from 1 to"),
        (["--precision", "float16"], "argument --precision: invalid choice: 'float16'"),
        (["--keep", "nothing.*"], "--keep 'nothing.*' matches no weight"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_plans(checkpoint: Path, tmp_path: Path, capsys: Capture, flags: list[str], message: str) -> None:
    assert message in refused(capsys, tmp_path, checkpoint, "--plan", *flags)
    assert "nowhere: no such folder" in refused(capsys, tmp_path, tmp_path / "nowhere", "--plan")


def test_a_build_that_does_not_fit_is_warned_of_and_carried_out(
    quick: None, checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plan_module.DEVICES, "sm121", replace(DEVICES["sm121"], usable_bytes=2**20))
    argv: list[Any] = [checkpoint, "-o", tmp_path / "bundle", "--max-seq-len", "64", "--block-size", "8"]
    assert main([str(arg) for arg in argv]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("qwen4exp-build: warning: precision checkpoint needs 2.") and err.count("\n") == 1
    assert "does not fit: 1.00 MiB usable\nstep" in out
