"""The engine's backend against a strict simulator of TensorRT's runtime, which executes the engine's ONNX."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bundles import build, tiny_checkpoint
from cpu_stream import CpuStream
from engine_bundles import engine_backend, prompt
from serving import assert_idle, generated, ids
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.tensorrt.module import load_trt
from qwen4exp_trt.runtime.verify_command import parse_args, verify

pytestmark = [pytest.mark.trt, pytest.mark.eager("compares both backends itself")]


@pytest.fixture
def bundle(engine_bundle: Path) -> Path:
    return engine_bundle


def verify_args(bundle: Path, **values: Any) -> argparse.Namespace:
    args = parse_args([str(bundle), "--device", "cpu"])
    return argparse.Namespace(**{**vars(args), **values})


def test_generates_what_the_program_does(trt: SimulatedTensorRT, bundle: Path) -> None:
    """Several requests of different lengths: prompts in chunks beside decoding, in both profiles."""
    prompts = [ids(list(range(3, 3 + length))) for length in (1, 11, 25)]
    params = SamplingParams(temperature=0, max_tokens=9)
    llm = LLM(bundle, enable_prefix_caching=False)  # its states are not the engine's
    expected = [generated(output) for output in llm.generate(prompts, params)]
    assert isinstance(llm.core.backend, EagerBackend)
    llm.core.backend = engine_backend(trt, bundle, llm.core.backend)
    assert [generated(output) for output in llm.generate(prompts, params)] == expected
    assert all(trt.calls.values()), trt.calls
    assert_idle(llm)


def test_rows_of_a_table_on_disk_are_bound_like_any_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint")
    bundle = build(checkpoint, tmp_path / "bundle", activation_dtype="bfloat16", ple_residency="disk")
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle)
    verify(verify_args(bundle, tolerance=1e-6), trt, CpuStream)
    assert "the engine agrees with the program" in capsys.readouterr().out
    prompts, params = [ids([5, 6, 7]), ids([9])], SamplingParams(temperature=0, max_tokens=9)
    llm = LLM(bundle, enable_prefix_caching=False)  # its states are not the engine's
    expected = [generated(output) for output in llm.generate(prompts, params)]
    loaded = llm.core.backend
    assert isinstance(loaded, EagerBackend) and loaded.rows is not None
    llm.core.backend = engine_backend(trt, bundle, loaded)
    llm.core.backend.rows = loaded.rows
    assert [generated(output) for output in llm.generate(prompts, params)] == expected


def test_verify_prints_every_step(trt: SimulatedTensorRT, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify(verify_args(bundle, tolerance=1e-6), trt, CpuStream)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"the engine agrees with the program within 1e-06 on {len(lines) - 1} steps"
    assert all("largest error 0.00e+00" in line for line in lines[:-1])
    for example in ("prefill", "beside decoding", "decode at", "verify a draft", "rejected"):
        assert any(example in line for line in lines), example


@pytest.mark.parametrize("layer", [0, 1])
def test_verify_names_the_first_tensor_that_differs(trt: SimulatedTensorRT, bundle: Path, layer: int) -> None:
    """An engine whose kernel of one layer is wrong: that layer's state is named, not what follows from it."""
    run, wrong = trt.run_node, ("layers.0.linear_attn.causal_conv1d", "layers.1.self_attn.qsa_attention")[layer]

    def damaged(node: Any, operands: list[torch.Tensor]) -> Any:
        outputs = run(node, operands)
        if node.name == wrong:
            outputs[-1].mul_(1.5)
        return outputs

    trt.run_node = damaged
    name = ("layers.0.linear_attn.conv_state", "layers.1.self_attn.kv_cache")[layer]
    with pytest.raises(BundleError, match=rf"prefill of tokens 0 to [0-9]+: the engine gives another {name} than"):
        verify(verify_args(bundle), trt, CpuStream)


def test_bundle_without_engine_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match="has no engine to verify; build it with --activation-dtype bfloat16"):
        verify(verify_args(tiny_bundle))


def test_engine_on_a_cpu_is_refused(bundle: Path) -> None:
    with pytest.raises(BundleError, match="the backend 'tensorrt-rtx' executes on a GPU; use device 'cuda', or"):
        LLM(bundle, backend="tensorrt-rtx", device="cpu")


def test_engine_of_another_program_is_refused(trt: SimulatedTensorRT, bundle: Path) -> None:
    """All differing tensors are named together."""
    loaded = LLM(bundle).core.backend
    assert isinstance(loaded, EagerBackend)
    state, other, *others = loaded.program.states
    (logits,) = loaded.program.outputs
    loaded.program.states = (replace(other, dtype="int32"), *others)
    loaded.program.outputs = (replace(logits, shape=("L", 7)),)
    with pytest.raises(BundleError) as error:
        engine_backend(trt, bundle, loaded)
    message = str(error.value)
    assert f"{state.name} is input {state.dtype} [-1" in message and f"{state.out_name} is output" in message
    assert f"{other.name} is input {other.dtype} [-1" in message and "expected input int32 [-1" in message
    assert f"{logits.name} is output {logits.dtype} [-1, 384], expected output {logits.dtype} [-1, 7]" in message
    loaded.program.states, loaded.program.outputs = (state, other, *others), (logits, replace(logits, name="more"))
    with pytest.raises(BundleError, match=r"not the program's: more is absent, expected output \w+ \[-1, 384\]; build"):
        engine_backend(trt, bundle, loaded)


def test_step_outside_the_profiles_is_refused(trt: SimulatedTensorRT, bundle: Path) -> None:
    llm = LLM(bundle)
    assert isinstance(llm.core.backend, EagerBackend)
    backend = engine_backend(trt, bundle, llm.core.backend)
    with pytest.raises(BundleError, match=r"no profile of the engine \(decode, prefill\) holds a step of the shapes"):
        backend.run(prompt(33))


def test_manifest_ranges_are_json(bundle: Path) -> None:
    """The backend takes profiles from the manifest as it was read back."""
    profiles = Manifest.load(bundle).profiles
    assert profiles == json.loads(json.dumps(profiles))
    assert list(profiles) == ["decode", "prefill"]
