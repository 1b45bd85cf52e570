from __future__ import annotations

from pathlib import Path

import bundles
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from sequence_programs import Model, programs_of

from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.backend import EagerBackend

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


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["device", "disk"])
def test_sequences_go_on_as_computed_from_scratch_at_length(tiny_llm: LLM, residency: str, tmp_path: Path) -> None:
    """Of a table on disk the ids before a step are a state of the host's."""
    built = bundles.build(bundles.tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "b", ple_residency=residency)
    backend = backend_of(LLM(built))
    assert backend.rows.residency == residency
    run(Model(backend, backend_of(tiny_llm)), max_examples=200, steps=50)
