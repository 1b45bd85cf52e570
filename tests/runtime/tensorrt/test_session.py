"""Execution contexts and captured steps of an engine, and how it ends."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_stream import CpuStream
from draft_head_steps import Rows, step_inputs
from engine_bundles import CPU, PAGES, decode, engine_backend, prompt
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.backend import EagerBackend, choose_backend
from qwen4exp_trt.runtime.load_options import CudaGraphs, LoadOptions
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.sampler import SampleRequest, TokenHistory, greedy_operands
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend

pytestmark = [pytest.mark.trt, pytest.mark.eager("about engines")]

RTX_ONLY = (
    "IRuntimeCache",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.set_runtime_cache",
    "CudaGraphStrategy",
    "IRuntimeConfig.cuda_graph_strategy",
    "IExecutionContext.is_stream_capturable",
    "DynamicShapesKernelSpecializationStrategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "EngineValidity",
    "Runtime.get_engine_validity",
)


def backend_of(trt: Any, bundle: Path, loaded: EagerBackend, **how: Any) -> TensorRTBackend:
    return engine_backend(trt, bundle, loaded, num_blocks=3 * PAGES, **how)


@pytest.mark.parametrize("graphs", list(CudaGraphs))
def test_steps_are_the_same_whoever_makes_graphs(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, graphs: CudaGraphs
) -> None:
    """Prompts, then decode steps of two shapes, each twice, all three ways to run one; states to the bit."""
    engine = backend_of(trt, engine_bundle, loaded, cuda_graphs=graphs)
    prompts = step_inputs(*(Rows(slot, 0, list(range(3, 12))) for slot in range(3)), pages=PAGES, num_logits=1)
    steps = [prompts, decode(9, 3), decode(10, 3), decode(11), decode(12)]
    requests = [SampleRequest(SamplingParams(temperature=0.0), TokenHistory([1]), seed=0) for _ in range(3)]
    for inputs in steps:
        assert torch.equal(loaded.run(inputs), engine.run(inputs))
        count = len(inputs["logits_indices"])
        expected, found = (each.sample_step(inputs, requests[:count], 300) for each in (loaded, engine))
        assert expected.tokens == found.tokens
        drawn, got = (each.draw_step(inputs, greedy_operands(count), None) for each in (loaded, engine))
        assert torch.equal(drawn.drawn, got.drawn) and torch.equal(drawn.logits.float(), got.logits.float())
    for name, state in loaded.states.items():
        assert torch.equal(state.view(torch.uint8), engine.states[name].view(torch.uint8)), name


def test_each_captured_shape_has_a_context_and_all_share_memory(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend
) -> None:
    engine = backend_of(trt, engine_bundle, loaded)
    session = engine.session
    assert len(session.contexts) == 2 and not any(context._is_captured for context in session.contexts)
    for num_seqs, expected in ((1, 3), (1, 3), (3, 4), (2, 5), (2, 5)):
        engine.run(decode(0, num_seqs))
        assert len(session.contexts) == expected
    engine.sample_step(decode(0), [SampleRequest(SamplingParams(temperature=0.0), TokenHistory([1]), seed=0)], None)
    assert len(session.contexts) == 6  # a graph of the step and its sampling
    assert engine._graphs is not None and len(engine._graphs.shapes) == 3
    first = session.activations.data_ptr()
    for context in session.contexts:
        assert context.handle._device_memory.address == first
        for spec in engine.program.states:
            address = engine.states[spec.name].data_ptr()
            assert context.handle.get_tensor_address(spec.name) == address
            assert context.handle.get_tensor_address(spec.out_name) == address
        for name, weight in engine.weights.items():
            assert context.handle.get_tensor_address(name) == weight.data_ptr()


def test_a_replay_asks_tensorrt_for_nothing(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = backend_of(trt, engine_bundle, loaded)
    engine.run(decode(0))
    monkeypatch.setattr("qwen4exp_trt.runtime.tensorrt.session.Context.enqueue", None)
    loaded.run(decode(0))
    assert torch.equal(engine.run(decode(1)), loaded.run(decode(1)))


def test_kernels_of_captured_steps_are_compiled_before(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend
) -> None:
    """A graph would keep the fallback that LAZY runs until they are."""
    strategies = trt.DynamicShapesKernelSpecializationStrategy
    engine = backend_of(trt, engine_bundle, loaded)
    engine.run(decode(0))
    uncaptured, captured = (config.dynamic_shapes_kernel_specialization_strategy for config in trt.configs)
    assert (uncaptured, captured) == (strategies.LAZY, strategies.EAGER)
    assert all(config.cuda_graph_strategy == trt.CudaGraphStrategy.DISABLED for config in trt.configs)


def test_graphs_of_tensorrt_for_rtx(trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend) -> None:
    """Steps keep their addresses, else each would be captured anew."""
    stream = CpuStream()
    engine = backend_of(trt, engine_bundle, loaded, cuda_graphs=CudaGraphs.TENSORRT, stream=stream)
    context, addresses = None, set()
    for position in range(3):
        engine.run(decode(position))
        context = engine.session.contexts[-1].handle
        addresses.add(context.get_tensor_address("input_ids"))
    assert len(addresses) == 1 and not stream._graphs
    (config,) = trt.configs
    assert config.cuda_graph_strategy == trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE


def test_what_cannot_be_captured_is_refused(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt.is_capturable = False
    engine = backend_of(trt, engine_bundle, loaded)
    engine.run(prompt(20))
    create, made = engine.session._create_context, list[Any]()

    def create_and_note(is_captured: bool) -> Any:
        handle = create(is_captured)
        made.append(weakref.ref(handle))
        return handle

    monkeypatch.setattr(engine.session, "_create_context", create_and_note)
    with pytest.raises(BundleError, match=r"a step of the shapes .* cannot be captured in a CUDA graph; load") as error:
        engine.run(decode(20))
    assert len(engine.session.contexts) == 2
    assert [ref() for ref in made] == [None], f"what could not run is dropped, also while somebody has the {error}"
    trt.is_capturable = True
    assert torch.equal(loaded.run(prompt(20)), engine.run(prompt(20)))
    assert torch.equal(loaded.run(decode(20)), engine.run(decode(20)))
    assert backend_of(trt, engine_bundle, loaded, cuda_graphs=CudaGraphs.NONE).run(decode(0)).isfinite().all()


@pytest.mark.parametrize("graphs", list(CudaGraphs))
def test_a_step_that_fails_can_be_run_again(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, graphs: CudaGraphs
) -> None:
    """The first of its shape, and where each step is enqueued anew, a later one too."""
    engine = backend_of(trt, engine_bundle, loaded, cuda_graphs=graphs)
    for position in range(1 if graphs == CudaGraphs.OWN else 2):
        trt.refusals["IExecutionContext.execute_async_v3"] = "too little memory"
        with pytest.raises(BundleError, match="TensorRT could not execute a step: too little memory"):
            engine.run(decode(position))
        assert torch.equal(loaded.run(decode(position)), engine.run(decode(position)))


def test_tensorrt_itself_has_none_of_it(engine_bundle: Path, loaded: EagerBackend, trt: SimulatedTensorRT) -> None:
    """The same code runs on the other module, which can do less."""
    lesser = SimulatedTensorRT(trt.real, engine_bundle, lacks=RTX_ONLY)
    assert not any(hasattr(lesser, name) for name in RTX_ONLY if "." not in name)
    engine = backend_of(lesser, engine_bundle, loaded)
    for inputs in (prompt(20), decode(20)):
        assert torch.equal(loaded.run(inputs), engine.run(inputs))
    with pytest.raises(BundleError, match=r"makes no CUDA graphs itself, only TensorRT for RTX does; use 'own'"):
        backend_of(lesser, engine_bundle, loaded, cuda_graphs=CudaGraphs.TENSORRT)
    with pytest.raises(BundleError, match=r"jit_cache .* is 'bundle', but .* compiles nothing when an engine runs"):
        backend_of(lesser, engine_bundle, loaded, jit_cache="bundle")
    backend_of(lesser, engine_bundle, loaded, jit_cache="user").close()


def test_what_tensorrt_says_of_an_engine_is_told(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = trt.EngineInvalidityDiagnostics
    trt.validity = trt.EngineValidity.SUBOPTIMAL, int(reasons.OLD_CUDA_DRIVER)
    with caplog.at_level(logging.WARNING):
        backend_of(trt, engine_bundle, loaded)
    assert "TensorRT runs it with reservations: old cuda driver" in caplog.text
    trt.validity = trt.EngineValidity.INVALID, int(reasons.UNSUPPORTED_CC) | int(reasons.OLD_CUDA_RUNTIME)
    with pytest.raises(BundleError, match=r"cannot run it here \(unsupported cc, old cuda runtime\)"):
        backend_of(trt, engine_bundle, loaded)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("Runtime.deserialize_cuda_engine", "TensorRT cannot load it: too little memory"),
        ("ICudaEngine.create_execution_context", "TensorRT cannot make an execution context: too little memory"),
        ("IExecutionContext.set_optimization_profile_async", "could not select the profile 0: too little memory"),
        ("IExecutionContext.set_tensor_address", "could not bind .*: too little memory"),
        ("IExecutionContext.set_input_shape", "could not set the shape of .*: too little memory"),
    ],
)
def test_what_tensorrt_refuses_has_its_own_words(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, call: str, message: str
) -> None:
    trt.refusals[call] = "too little memory"
    with pytest.raises(BundleError, match=message):
        backend_of(trt, engine_bundle, loaded)


def test_a_closed_engine_is_gone(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its last step: contexts before the engine before the runtime."""
    stream = CpuStream()
    engine = backend_of(trt, engine_bundle, loaded, stream=stream)
    for inputs in (prompt(20), decode(20)):
        engine.run(inputs)
    engine.draw_step(decode(21), greedy_operands(1), None)
    session, gone = engine.session, list[str]()
    parts = [
        *((context.handle, "context") for context in session.contexts),
        *((each, "config") for each in trt.configs),
    ]
    for part, name in (*parts, (session.engine, "engine"), (session._runtime, "runtime")):
        weakref.finalize(part, gone.append, name)
    monkeypatch.setattr(stream, "synchronize", lambda: gone.append("last step"))
    trt.configs.clear()
    del parts, part, session
    engine.close()
    engine.close()
    gc.collect()
    assert not stream._graphs
    assert gone == ["last step"] + ["context"] * 4 + ["config"] * 2 + ["engine", "runtime"]
    for use in (engine.run, engine.run_step, lambda inputs: engine.draw_step(inputs, {}, None)):
        with pytest.raises(BundleError, match="this backend was closed, so it runs nothing more; load the"):
            use(decode(0))


def test_an_engine_on_a_lost_gpu_is_closed_all_the_same(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = backend_of(trt, engine_bundle, loaded)
    monkeypatch.setattr("qwen4exp_trt.runtime.program_backend.is_lost", lambda device: True)
    monkeypatch.setattr(CpuStream, "synchronize", None)
    engine.close()
    assert engine.session.engine is None


def test_options_that_a_backend_lacks(engine_bundle: Path) -> None:
    manifest = Manifest.load(engine_bundle)
    for graphs in ("own", "tensorrt"):
        with pytest.raises(BundleError, match=rf"is '{graphs}', which the backend 'eager' on cpu cannot do; use"):
            choose_backend("eager", None, engine_bundle, manifest, LoadOptions(cuda_graphs=graphs))
    assert choose_backend("eager", None, engine_bundle, manifest, LoadOptions(cuda_graphs="none")).device == CPU
    with pytest.raises(BundleError, match="cuda_graphs is 'some'; it must be one of own, tensorrt, none"):
        LoadOptions(cuda_graphs="some")
    for value in ("", 3):
        with pytest.raises(BundleError, match="it must be 'user', 'bundle', 'none' or a folder"):
            LoadOptions(jit_cache=value)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BundleError, match=r"is 'bundle', but the backend 'eager' has no engine whose compiled kernels"):
        choose_backend("eager", None, engine_bundle, manifest, LoadOptions(jit_cache="bundle"))
    choose_backend("eager", None, engine_bundle, manifest, LoadOptions(jit_cache="none"))
