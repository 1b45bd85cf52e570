from __future__ import annotations

from pathlib import Path

import bundles
import pytest
from cpu_stream import CpuStream
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from sequence_programs import CHUNK, NUM_BLOCKS, NUM_SLOTS, EngineModel, Model, programs_of
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.backend import EagerBackend, engines_of
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.eager("looks at results of single ops, over states of its own")


def backend_of(llm: LLM) -> EagerBackend:
    assert isinstance(llm.core.backend, EagerBackend)
    return llm.core.backend


def run(model: Model, max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        programs_of(model),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_sequences_go_on_as_computed_from_scratch(tiny_llm: LLM) -> None:
    backend = backend_of(tiny_llm)
    run(Model(backend, backend), max_examples=12, steps=25)


def run_on_an_engine(tmp_path: Path, reference: EagerBackend, max_examples: int, steps: int) -> None:
    rows = {"max_batch_size": 2 * NUM_SLOTS, "prefill_chunk": NUM_SLOTS * CHUNK}
    bundle = bundles.build_with_stand_in(bundles.tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "b", **rows)
    loaded, trt = backend_of(LLM(bundle, num_blocks=NUM_BLOCKS)), SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle)
    engine = engines_of(trt, bundle, Manifest.load(bundle), loaded, make_stream=CpuStream)
    run(EngineModel(engine, reference), max_examples, steps)
    assert trt.calls["decode"] > max_examples


@pytest.mark.trt
def test_sequences_on_an_engine_go_on_as_computed_from_scratch(tmp_path: Path, tiny_llm: LLM) -> None:
    """By its captured steps, and those that are not."""
    run_on_an_engine(tmp_path, backend_of(tiny_llm), max_examples=5, steps=15)


@pytest.mark.slow
@pytest.mark.trt
def test_sequences_on_an_engine_at_length(tmp_path: Path, tiny_llm: LLM) -> None:
    run_on_an_engine(tmp_path, backend_of(tiny_llm), max_examples=60, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["device", "disk"])
def test_sequences_go_on_as_computed_from_scratch_at_length(tiny_llm: LLM, residency: str, tmp_path: Path) -> None:
    """Of a table on disk the ids before a step are a state of the host's."""
    built = bundles.build(bundles.tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "b", ple_residency=residency)
    backend = backend_of(LLM(built))
    assert backend.rows.residency == residency
    run(Model(backend, backend_of(tiny_llm)), max_examples=200, steps=50)
