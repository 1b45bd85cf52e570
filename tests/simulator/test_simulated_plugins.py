"""Whole engines of tiny models by the plugins' own ``enqueue`` on host memory, beside the ops' CPU bodies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from cpu_stream import CpuStream
from packed_steps import PAGES, STEPS, packed_step
from quantized_checkpoints import write_quantized
from simulated_session import HandMadeSession
from trt_simulator import SimulatedTensorRT, SimulatorError
from trt_simulator import plugins as simulated_plugins

from qwen4exp_trt.plugins.kernels import Plan
from qwen4exp_trt.plugins.spec import NAMESPACE
from qwen4exp_trt.runtime.backend import engines_of, load_eager_backend
from qwen4exp_trt.runtime.load_options import CudaGraphs, LoadOptions
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = [pytest.mark.trt, pytest.mark.eager("about the simulator")]

PROMPTS = packed_step((0, 0), (24, 8))
PROMPTS["logits_indices"] = PROMPTS["logits_indices"][[3, 23, 31]]
"""More tokens than the profile of decode steps takes."""


def test_of_every_precision() -> None:
    """The cases below are all there are."""
    assert {case.values[0] for case in CASES} == {"float32", "bf16", "fp8", "nvfp4"}


def build_float32(folder: Path) -> Path:
    return bundles.build_with_stand_in(bundles.tiny_checkpoint(folder / "checkpoint"), folder / "bundle", **CHUNKS)


def build_bf16(folder: Path, **options: Any) -> Path:
    return bundles.build_with_stand_in(
        bundles.tiny_checkpoint(folder / "checkpoint"),
        folder / "bundle",
        activation_dtype="bfloat16",
        **CHUNKS,
        **options,
    )


def build_nvfp4(folder: Path) -> Path:
    return build_bf16(folder, precision="nvfp4", ple="nvfp4")


def build_fp8(folder: Path) -> Path:
    """As the FP8 release is: weights in blocks; and the KV cache in FP8 too."""
    write_quantized(folder / "release", "FP8", bundles.config_dict())
    options = {"activation_dtype": "bfloat16", "precision": "checkpoint", "kv_cache_dtype": "fp8", **CHUNKS}
    return bundles.build_with_stand_in(folder / "release", folder / "bundle", **options)


CHUNKS = {"prefill_chunk": 32}
CASES = [
    pytest.param("float32", build_float32, 2e-6, id="float32"),
    pytest.param("bf16", build_bf16, 1e-2, id="bf16"),
    pytest.param("fp8", build_fp8, 2e-2, id="fp8"),
    pytest.param("nvfp4", build_nvfp4, 1e-2, id="nvfp4"),
]


def load(bundle: Path, plugins: str) -> tuple[TensorRTBackend, SimulatedTensorRT]:
    manifest, cpu = Manifest.load(bundle), torch.device("cpu")
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle, plugins=plugins)
    loaded = load_eager_backend(bundle, manifest, LoadOptions(num_blocks=3 * PAGES), cpu)
    for state in loaded.states.values():
        state.view(torch.uint8).fill_(255)
    return engines_of(trt, bundle, manifest, loaded, CudaGraphs.OWN, "none", CpuStream), trt


@pytest.mark.slow
@pytest.mark.time_limit(900)
@pytest.mark.parametrize(("name", "build", "tolerance"), CASES)
def test_plugins_compute_what_the_ops_do(
    name: str, build: Callable[[Path], Path], tolerance: float, tmp_path: Path
) -> None:
    """Prompts, decode steps as CUDA graphs of them, drafts; slots and pages hold NaN before."""
    bundle = build(tmp_path)
    bodies, plugins = (load(bundle, kind) for kind in ("body", "enqueue"))
    for step in (*STEPS, PROMPTS):
        expected, found = (backend.run(step) for backend, _ in (bodies, plugins))
        assert (found - expected).norm() <= tolerance * expected.norm()
    assert plugins[1].calls == bodies[1].calls and all(plugins[1].calls.values())


# --- what a wrong plugin does -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return bundles.build_with_stand_in(bundles.tiny_checkpoint(base / "tiny-checkpoint"), base / "stand-in-plugins")


@pytest.fixture
def session(bundle: Path) -> HandMadeSession:
    return HandMadeSession(SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle, plugins="enqueue"))


Launch = Callable[[Plan, Mapping[str, int], int], None]


@pytest.fixture
def launches(session: HandMadeSession, monkeypatch: pytest.MonkeyPatch) -> Callable[[Launch], None]:
    """Replaces what plugins launch. Else nothing is computed: results keep what memory had."""

    def replace(launch: Launch) -> None:
        def execute(plan: Plan, pointers: Mapping[str, int], *, scratch: int, semaphores: int) -> None:
            launch(plan, pointers, scratch)

        monkeypatch.setattr(simulated_plugins, "execute_emulated", execute)

    return replace


def test_states_are_given_where_they_are(session: HandMadeSession, launches: Callable[[Launch], None]) -> None:
    """The addresses that TensorRT was told, of every state, once; never those of an output."""
    seen: list[Mapping[str, int]] = []
    launches(lambda plan, pointers, scratch: seen.append(pointers))
    session.execute()
    nodes = [node for node in session.trt.program.graph.node if node.domain == NAMESPACE]
    assert len(seen) == len(nodes)
    found: dict[str, int] = {}
    for node, pointers in zip(nodes, seen, strict=True):
        spec = session.trt.program.plugin_of(node)
        assert spec is not None and list(pointers) == [arg.name for arg in (*spec.inputs, *spec.outputs)]
        for name, arg in zip(node.input, spec.inputs, strict=True):
            if arg.mutated:
                found[name.removesuffix("_out")] = pointers[arg.name]
            elif name in session.tensors:
                assert pointers[arg.name] == session.tensors[name].data_ptr(), name
    states = {name: session.tensors[name].data_ptr() for name in session.trt.engine_files[0].aliases.values()}
    assert found.items() >= {name: states[name] for name in found}.items() and found.keys() == states.keys()


def test_a_plugin_that_raises_is_a_failed_execution(
    session: HandMadeSession, launches: Callable[[Launch], None]
) -> None:
    """As the bindings make it: False and a message, not the exception. States are what they were."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel image")

    launches(fail)
    states = {name: tensor.clone() for name, tensor in session.tensors.items() if name.startswith("layers.")}
    with session.stream.fork():
        assert session.enqueue() is False
    assert "RuntimeError: no kernel image" in session.trt.log.problems()
    assert all(torch.equal(session.tensors[name], state) for name, state in states.items())


def write(address: int) -> None:
    ctypes.memset(address, 1, 1)


def wrong_launch(kind: str) -> tuple[Launch, str]:
    def beyond_workspace(plan: Plan, pointers: Mapping[str, int], scratch: int) -> None:
        if plan.scratch_bytes:
            write(scratch - 1)

    def beyond_output(plan: Plan, pointers: Mapping[str, int], scratch: int) -> None:
        write(list(pointers.values())[-1] - 1)

    def operand(plan: Plan, pointers: Mapping[str, int], scratch: int) -> None:
        write(next(iter(pointers.values())))

    return {
        "workspace": (beyond_workspace, "writes beyond its workspace"),
        "output": (beyond_output, "writes beyond .*"),
        "operand": (operand, "writes an operand that is no state"),
    }[kind]


@pytest.mark.parametrize("kind", ["workspace", "output", "operand"])
def test_writing_where_nothing_was_given(
    session: HandMadeSession, launches: Callable[[Launch], None], kind: str
) -> None:
    launch, message = wrong_launch(kind)
    launches(launch)
    with session.stream.fork(), pytest.raises(SimulatorError, match=message):
        session.enqueue()


def test_workspace_is_as_large_as_asked(session: HandMadeSession, launches: Callable[[Launch], None]) -> None:
    """The byte behind it is guarded, for every plugin that asks for some."""
    nodes = session.context._plugins.nodes
    assert any(any(node.workspace_bytes) for node in nodes.values())
    sizes = iter(nodes.values())

    def behind(plan: Plan, pointers: Mapping[str, int], scratch: int) -> None:
        (size, *_) = next(sizes).workspace_bytes
        assert plan.scratch_bytes <= size
        if size:
            write(scratch + size)

    launches(behind)
    with session.stream.fork(), pytest.raises(SimulatorError, match="writes beyond its workspace"):
        session.enqueue()


def test_values_of_the_graph_have_types(bundle: Path) -> None:
    """Workspace is asked for by them: none may be missing."""
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle)
    values: Mapping[str, tuple[torch.dtype, list[Any]]] = simulated_plugins._values(trt.program.graph)
    for node in trt.program.graph.node:
        assert values.keys() >= {*node.input, *node.output}, node.name
