"""Failures in the middle of a build, what a build writes, and ``--verify``."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import bundles
import onnx
import pytest
from build_command import FLOAT32, STAGES, Capture, refused, tree

from qwen4exp_trt.builder import build as build_module
from qwen4exp_trt.builder import compile as compile_module
from qwen4exp_trt.builder import memory as memory_module
from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.compile import CompiledProgram
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.builder.reporter import Reporter
from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.file_identity import FileIdentity
from qwen4exp_trt.runtime.manifest import ENGINE_FILE, LAYERS_FILE, ONNX_FILE, Manifest
from qwen4exp_trt.runtime.program import Program

# --- failures in the middle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("failing", STAGES)
def test_a_failing_stage_leaves_the_earlier_bundle(
    bundle: Path, checkpoint: Path, failing: str, error: type[BaseException]
) -> None:
    class Failing(Reporter):
        stages: ClassVar[list[str]] = []

        def stage(self, name: str) -> None:
            self.stages.append(name)
            if name == failing:
                raise error

    before = tree(bundle.parent)
    with pytest.raises(error):
        build_bundle(BuildOptions(checkpoint=checkpoint, output=bundle, max_seq_len=64, block_size=8), Failing())
    assert Failing.stages == STAGES[: STAGES.index(failing) + 1]
    assert tree(bundle.parent) == before
    assert LLM(bundle).generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=1))


@pytest.mark.parametrize(
    ("where", "name"),
    [(build_module, "save_program"), (onnx, "save"), (build_module, "hash_files"), (Manifest, "save")],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=type)
def test_a_failing_write_leaves_the_earlier_bundle(
    bundle: Path,
    checkpoint: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    error: BaseException,
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(where, name, fail)
    argv = [str(checkpoint), "-o", str(bundle), *FLOAT32]
    before = tree(bundle.parent)
    capsys.readouterr()
    if isinstance(error, OSError):
        message = refused(capsys, bundle.parent, *argv)
        assert f"cannot write the bundle {bundle}: [Errno 28] No space left on device" in message
    else:
        assert main(argv) == 130
        assert capsys.readouterr().err == "qwen4exp-build: interrupted\n"
    assert tree(bundle.parent) == before


def test_building_again_replaces_the_bundle(bundle: Path, checkpoint: Path) -> None:
    (bundle / "leftover").write_text("of the first")
    assert main([str(checkpoint), "-o", str(bundle), *FLOAT32, "--max-batch-size", "5"]) == 0
    assert Manifest.load(bundle).limits.max_batch_size == 5
    assert not (bundle / "leftover").exists()
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


# --- what is written --------------------------------------------------------------------------------------------------


def test_checkpoint_path_is_recorded_absolute(
    quick: None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert main([checkpoint.name, "-o", str(tmp_path / "bundle"), *FLOAT32]) == 0
    ref = Manifest.load(tmp_path / "bundle").checkpoint
    assert ref is not None and ref.path == str(checkpoint.resolve())
    assert ref.files == {"model.safetensors": FileIdentity.of(checkpoint / "model.safetensors")}


def test_config_only_takes_tokenizer_files_of_a_folder_but_not_from_beside_a_config(
    quick: None, checkpoint: Path, tmp_path: Path
) -> None:
    text_files = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    for source, expected in ((checkpoint, text_files), (checkpoint / "config.json", set())):
        assert main([str(source), "-o", str(tmp_path / "bundle"), "--config-only", *FLOAT32]) == 0
        manifest = Manifest.load(tmp_path / "bundle")
        assert text_files & set(manifest.files) == expected
        assert manifest.checkpoint is None
        assert manifest.stop_token_ids == ((bundles.IM_END, bundles.ENDOFTEXT) if expected else (bundles.ENDOFTEXT,))


@pytest.mark.trt
def test_bundle_with_an_engine(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main([str(checkpoint), "-o", str(tmp_path / "bundle"), *FLOAT32[2:]]) == 0
    manifest = Manifest.load(tmp_path / "bundle")
    manifest.check_files(tmp_path / "bundle")
    assert (manifest.precision, manifest.target, manifest.backend) == ("checkpoint", "sm121", "tensorrt-rtx")
    assert {ENGINE_FILE, LAYERS_FILE, ONNX_FILE, "program/graph.py", "program/tables.json"} <= set(manifest.files)
    written = {name for name, kind in tree(tmp_path / "bundle").items() if kind != "folder"}
    assert written == {*manifest.files, "manifest.json"}
    assert {"torch", "onnx", "python", "tensorrt_rtx"} <= set(manifest.tools)
    assert re.search(r"engine +\d+\.\d\d MiB for sm121, by tensorrt-rtx\n", capsys.readouterr().out)
    (result,) = LLM(tmp_path / "bundle").generate("the", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 3


# --- --verify --------------------------------------------------------------------------------------------------------


def test_verify_executes_every_pass_and_the_onnx(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main([str(checkpoint), "-o", str(tmp_path / "bundle"), *FLOAT32, "--verify"]) == 0
    out = capsys.readouterr().out
    verified = r"verified +relative error of the passes \d\.\de[-+]\d\d, of the ONNX \d\.\de[-+]\d\d \(float32\)\n"
    assert re.search(verified, out)
    passes = Manifest.load(tmp_path / "bundle").passes
    assert len(passes) == len(make_pipeline(Quantization()))
    assert all(0 <= result["max_error"] < 1e-5 for result in passes)


@graph_pass()
def break_a_norm(program: Program) -> int:
    """Claims to change no arithmetic, and replaces an epsilon."""
    for node in program.calls():
        if 1e-6 in node.args:
            node.args = tuple(0.5 if arg == 1e-6 else arg for arg in node.args)
            return 1
        if 0.5 in node.args:
            return 0
    raise AssertionError("no node has an epsilon")


def test_verify_finds_a_broken_pass(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "make_pipeline", lambda *args: (break_a_norm,))
    argv = [checkpoint, "-o", tmp_path / "bundle", *FLOAT32]
    assert main([str(arg) for arg in argv]) == 0, "nothing else finds it"
    shutil.rmtree(tmp_path / "bundle")
    capsys.readouterr()
    assert re.search(r"pass break_a_norm changes .*: relative RMS error", refused(capsys, tmp_path, *argv, "--verify"))


def test_verify_finds_an_onnx_that_differs(
    checkpoint: Path, compiled: CompiledProgram, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.ModelProto.FromString(compiled.onnx_model.SerializeToString())
    next(node for node in model.graph.node if node.op_type == "Div").op_type = "Mul"
    broken = CompiledProgram(compiled.program, model, compiled.passes)
    monkeypatch.setattr(build_module, "compile_program", lambda *args, **options: broken)
    message = refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle", *FLOAT32, "--verify")
    assert re.search(r"the ONNX gives another .* than the program: relative error .*, tolerance 1e-05", message)


def test_verify_needs_memory(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "available_memory", lambda: 1000)
    message = refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle", *FLOAT32, "--verify")
    assert re.search(r"--verify needs about .* GiB of memory for this model, .* GiB are available; build wi", message)
