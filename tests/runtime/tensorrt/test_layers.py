"""``qwen4exp-verify`` of an engine that shows its plugin inputs: what is wrong in it is named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bundles
import pytest
import torch
from cpu_stream import CpuStream
from torch import Tensor
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.builder import planning
from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import verify_command
from qwen4exp_trt.runtime.backend import load_eager_backend
from qwen4exp_trt.runtime.layer_watch import LayerWatch, places_of
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.tensorrt.module import load_trt
from qwen4exp_trt.runtime.verify_command import main, parse_args, verify

pytestmark = pytest.mark.trt

CONV, DELTA = "layers.0.linear_attn.causal_conv1d", "layers.0.linear_attn.gated_delta_rule"
PROJECTION, MOE = "layers.0.linear_attn.out_proj.linear", "layers.0.mlp.moe"
READ = "layers.0.mlp_hyper_connection.hc_read"
SELECT, ATTENTION = "layers.1.self_attn.indexer.qsa_select", "layers.1.self_attn.qsa_attention"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a draft head, and all plugin inputs marked. Nothing here asks the engine itself."""
    folder = tmp_path_factory.mktemp("marked")
    checkpoint = bundles.mtp_checkpoint(tmp_path_factory.getbasetemp())
    options: dict[str, Any] = {"activation_dtype": "bfloat16", "prefill_chunk": 32, "mark_plugin_inputs": ("*",)}
    with patch.multiple(planning, estimate_activations=lambda *step: 0, estimate_workspace=lambda *step: 0):
        return bundles.build_with_stand_in(checkpoint, folder / "bundle", **options)


@pytest.fixture
def trt(bundle: Path) -> SimulatedTensorRT:
    return SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle)


def verify_args(bundle: Path, *argv: str) -> argparse.Namespace:
    return parse_args([str(bundle), "--device", "cpu", *argv])


def damage(
    trt: SimulatedTensorRT,
    name: str,
    outputs: Callable[[list[Tensor]], Any] = lambda results: None,
    inputs: Callable[[list[Tensor]], Any] = lambda operands: None,
) -> None:
    """From now on the node ``name`` reads copies of its operands that ``inputs`` changes (states are what they are),
    and its results (copies, but for states) are changed by ``outputs``."""
    run = trt.run_node

    def damaged(node: Any, operands: list[Tensor]) -> Any:
        if node.name != name:
            return run(node, operands)
        pairs = zip(operands, node.input, strict=True)
        states = {id(operand) for operand, source in pairs if f"{source}_out" in node.output}
        read = [operand if id(operand) in states else operand.clone() for operand in operands]
        inputs(read)
        results = [result if id(result) in states else result.clone() for result in run(node, read)]
        outputs(results)
        return results

    trt.run_node = damaged


def refused(trt: SimulatedTensorRT, bundle: Path, *argv: str) -> str:
    with pytest.raises(BundleError) as error:
        verify(verify_args(bundle, *argv), trt, CpuStream)
    return str(error.value)


def test_every_value_of_an_engine_that_is_right_agrees(
    trt: SimulatedTensorRT, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(verify_args(bundle, "--tolerance", "1e-6", "--layers"), trt, CpuStream)
    *lines, agree, hint = capsys.readouterr().out.splitlines()
    manifest = Manifest.load(bundle)
    assert agree.startswith("the engines of the model and its draft head agree with theirs within 1e-06 on ")
    num_marked = len(manifest.all_debug_outputs)
    assert hint.startswith(f"so do the {num_marked} plugin inputs that it shows; if the same bundle without --mark-")
    steps = [line for line in lines if "largest error" in line]
    assert all("largest error 0.00e+00 of 18 tensors; of" in line for line in steps)
    rows = [line.split() for line in lines if line.startswith(" 0.00e+00")]
    assert len(rows) % len(steps) == 0 and all(row[:2] == ["0.00e+00"] * 2 for row in rows)
    first = rows[: len(rows) // len(steps)]
    shown = {" ".join(row[4:]).removeprefix("the draft head's ").split(" ", 1)[0] for row in first}
    assert shown >= {spec.name for spec in manifest.all_debug_outputs}
    assert ["0.00e+00", "0.00e+00", "bfloat16", "32x32", MOE, "(q4e.moe)"] in first
    assert sum(" ".join(row).endswith("logits by lm_head.linear (aten.linear)") for row in first) == 2


def test_an_op_that_computes_something_else_is_named(trt: SimulatedTensorRT, bundle: Path) -> None:
    damage(trt, MOE, outputs=lambda results: results[0][-1].mul_(1.5))
    said = refused(trt, bundle)
    assert said.startswith(
        f"prefill of tokens 0 to 32: the first value that the engine makes otherwise than the program is {MOE}, "
        "bfloat16 [32, 32] (own error 0."
    )
    assert "first at row 31, column 0: " in said and "elements in 1 of 32 rows" in said
    assert f"made by {MOE} (q4e.moe) from {READ}.mixed (error 0 from the program's own run)" in said
    assert "read by layers.1.attn_hyper_connection.hc_read." in said
    assert said.endswith("its kernel is wrong on this GPU, or it reads something else than what is shown")


def test_an_input_that_was_overwritten_for_all_is_named(trt: SimulatedTensorRT, bundle: Path) -> None:
    """Its memory was used again before the plugin read it and before it was shown."""
    damage(trt, PROJECTION, outputs=lambda results: results[0].copy_(torch.arange(1024).view(32, 32)))
    said = refused(trt, bundle)
    assert f"the program is {PROJECTION}, bfloat16 [32, 32]" in said
    assert f"made by {DELTA} (q4e.gated_delta_rule), {PROJECTION} (aten.linear) from {CONV}, " in said
    assert f"read by {READ}." in said
    assert said.endswith("One of these ops is wrong, or its result was overwritten before it was shown or read")


def test_data_of_another_value_are_recognized(trt: SimulatedTensorRT, bundle: Path) -> None:
    kept: list[Tensor] = []
    damage(trt, READ, outputs=lambda results: kept.append(results[1].clone()))
    damage(trt, MOE, outputs=lambda results: results[0].copy_(kept[-1]))
    said = refused(trt, bundle)
    assert f"the program is {MOE}, " in said
    assert f"it is what {READ}.mixed has at the same place, so memory is used twice or an address is wrong." in said


def test_an_input_that_was_overwritten_for_its_reader_alone_is_told(trt: SimulatedTensorRT, bundle: Path) -> None:
    """What is shown of it agrees: what its reader has made of it does not."""
    damage(trt, CONV, inputs=lambda operands: operands[0].copy_(operands[0].roll(1, 0)))
    said = refused(trt, bundle)
    assert f"the program is {CONV}, " in said
    assert f"made by {CONV} (q4e.causal_conv1d) from layers.0.linear_attn.in_proj_qkv_in_proj_z (error 0 " in said
    assert (
        "What this plugin reads agrees as the engine shows it, so its kernel is wrong on this GPU, or it reads " in said
    )


def test_a_state_that_is_updated_wrongly_is_named(trt: SimulatedTensorRT, bundle: Path) -> None:
    damage(trt, ATTENTION, outputs=lambda results: results[-1].mul_(1.5))
    said = refused(trt, bundle)
    assert "the first state that the engine makes otherwise than the program is layers.1.self_attn.kv_cache, " in said
    assert f"made by {ATTENTION} (q4e.qsa_attention) from " in said and "read by no later plugin." in said


def test_integers_are_compared_exactly(trt: SimulatedTensorRT, bundle: Path) -> None:
    def change(results: list[Tensor]) -> None:
        results[0][3, 1] = 7

    damage(trt, SELECT, outputs=change)
    said = refused(trt, bundle, "--tolerance", "0.5")
    assert f"the program is {SELECT}, int32 [32, 4] (own error 1, tolerance 0.5; " in said
    assert "first at row 3, column 1: 7 instead of -1; 1 of 128 elements" in said


def test_wrong_indices_are_not_read_by(trt: SimulatedTensorRT, bundle: Path) -> None:
    """The engine's run survives what the ops on the CPU would not."""
    damage(trt, "layers.0.ple.ple_embedding.ple_hash", outputs=lambda results: results[0].fill_(10**9))
    damage(trt, "layers.0.ple.ple_embedding.ple_gather", inputs=lambda operands: operands[0].zero_())
    assert "the program is layers.0.ple.ple_embedding.ple_hash, int64" in refused(trt, bundle)


def test_a_value_that_nobody_writes_is_told(trt: SimulatedTensorRT, bundle: Path) -> None:
    """Not taken for what the step before has left."""
    load, bound = verify_command._load, []

    def load_with_values_elsewhere(*args: Any) -> Any:
        program, engine, watches = load(*args)
        bound.append(engine.debug_outputs)
        engine.debug_outputs = {name: torch.zeros_like(value) for name, value in bound[0].items()}
        return program, engine, watches

    with patch.object(verify_command, "_load", load_with_values_elsewhere):
        said = refused(trt, bundle)
    assert "the program is cat, " in said and "(own error nan, tolerance 0.05; nan from " in said
    assert "NaN, as was there before the step: maybe nothing was written" in said


def test_what_grows_over_the_layers_is_no_ops_fault(trt: SimulatedTensorRT, bundle: Path) -> None:
    """Every op is within the tolerance of what it reads; what they give together is not."""
    run = trt.run_node

    def rounded(node: Any, operands: list[Tensor]) -> Any:
        return [r * 1.03 for r in run(node, operands)] if node.op_type == "Gemm" else run(node, operands)

    trt.run_node = rounded
    said = refused(trt, bundle, "--tolerance", "0.039")
    assert "the engine gives another " in said
    assert "no op is at fault, for on what the engine reads each gives what the engine has within 0.03" in said


def test_what_grows_over_the_steps_is_no_ops_fault(trt: SimulatedTensorRT, bundle: Path) -> None:
    before: list[Tensor] = []

    def grow(results: list[Tensor]) -> None:
        """What the step has changed of the recurrent state."""
        results[1].mul_(torch.where(results[1] == before[-1], 1.0, 1.03))

    damage(trt, DELTA, inputs=lambda operands: before.append(operands[6].clone()), outputs=grow)
    said = refused(trt, bundle, "--tolerance", "0.05")
    assert "the engine gives another layers.0.linear_attn.recurrent_state than the program" in said
    assert not said.startswith("prefill of tokens 0 to") and "no op is at fault" in said


def test_the_draft_heads_engine_is_followed_too(trt: SimulatedTensorRT, bundle: Path) -> None:
    program, name = trt.engine_files[1].program, "mtp.layers.0.self_attn.o_proj.linear"
    run = program._run_node

    def damaged(node: Any, operands: list[Tensor]) -> Any:
        return [result * 1.5 for result in run(node, operands)] if node.name == name else run(node, operands)

    with patch.object(program, "_run_node", damaged):
        said = refused(trt, bundle)
    assert f"the program is the draft head's {name}, " in said


# --- places, and engines with some of them ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(bundle: Path) -> Program:
    options = LoadOptions(num_blocks=4)
    return load_eager_backend(bundle, Manifest.load(bundle), options, torch.device("cpu")).program


def test_between_few_marked_values_there_are_many_ops(program: Program) -> None:
    (moe,) = places_of(program, {MOE})[MOE.replace(".", "__")]
    assert moe.ops[-1].path == MOE and len(moe.ops) > 8
    assert {op.path for op in moe.ops} >= {"embed_tokens.embedding", CONV, DELTA, READ}
    # The states that were updated on the way are shown by every engine.
    assert set(moe.sources) == {spec.name for spec in program.states if spec.name.startswith("layers.0.")}
    (again,) = places_of(program, {MOE, f"{READ}.mixed"})[MOE.replace(".", "__")]
    assert [op.path for op in again.ops] == [MOE] and again.sources == (f"{READ}.mixed",)


def test_few_marked_values_lead_to_more(trt: SimulatedTensorRT, bundle: Path) -> None:
    """The error says what else to mark. The engine shows more than it is asked for here."""
    damage(trt, DELTA, outputs=lambda results: results[0].mul_(1.5))
    manifest = Manifest.load(bundle)
    few = tuple(spec for spec in manifest.debug_outputs if spec.name == f"{READ}.mixed")
    watch_init = LayerWatch.__init__

    def watch_few(self: LayerWatch, backend: Any, marked: Any, *rest: Any) -> None:
        watch_init(self, backend, few if marked == manifest.debug_outputs else marked, *rest)

    with patch.object(LayerWatch, "__init__", watch_few):
        said = refused(trt, bundle)
    assert f"the program is {READ}.mixed, " in said
    assert "One of these ops is wrong, or reads something else than it should; to see between them mark more" in said
    hidden = said.rpartition("qwen4exp-build --mark-plugin-inputs ")[2].split()
    assert {f"'{CONV}'", f"'{DELTA}'", f"'{READ}'"} <= set(hidden)


def test_debug_outputs_of_another_program_are_refused(program: Program) -> None:
    with pytest.raises(BundleError, match=r"lists debug outputs that the program does not compute: layers\.7\.mlp"):
        places_of(program, {MOE, "layers.7.mlp"})


def test_an_engine_without_the_outputs_of_its_manifest_is_refused(trt: SimulatedTensorRT, bundle: Path) -> None:
    manifest = Manifest.load(bundle)
    fewer = replace(manifest, debug_outputs=manifest.debug_outputs[1:])
    with patch.object(Manifest, "load", lambda folder: fewer):
        said = refused(trt, bundle)
    assert f"{manifest.debug_outputs[0].name} is output bfloat16 [-1, 128], expected none" in said


def test_layers_of_an_engine_that_shows_none_are_refused(trt: SimulatedTensorRT, bundle: Path) -> None:
    manifest = Manifest.load(bundle)
    assert manifest.draft is not None
    without = replace(manifest, debug_outputs=(), draft=replace(manifest.draft, debug_outputs=()))
    with patch.object(Manifest, "load", lambda folder: without):
        said = refused(trt, bundle, "--layers")
    assert "its engine shows no values for --layers; build it with --mark-plugin-inputs" in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--device", "cpu"], "device 'cpu': an engine executes on a GPU, only the backend 'eager' on the CPU"),
        (["--tolerance", "-1"], "argument --tolerance: -1 is no tolerance; give 0 or more"),
        (["--tolerance", "nan"], "argument --tolerance: nan is no tolerance; give 0 or more"),
        (["--seed", "-1"], "argument --seed: -1 is no seed; give 0 or more"),
        (["--seed", str(2**64)], "is no seed; give 0 or more, below 2**63"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    bundle: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main([str(bundle), *argv]))
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and err.count("\n") == 1
