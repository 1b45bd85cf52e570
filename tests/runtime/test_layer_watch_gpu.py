"""An engine followed layer by layer on a GPU. In its place a program runs there that shows values as an engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from torch import Tensor, fx

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.backend import EagerBackend, load_eager_backend
from qwen4exp_trt.runtime.layer_report import check_layers
from qwen4exp_trt.runtime.layer_watch import LayerWatch
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.program import path_from_identifier
from qwen4exp_trt.runtime.side_by_side import check_difference, compare, make_steps
from qwen4exp_trt.runtime.specs import TensorSpec, extent_of
from qwen4exp_trt.runtime.state_pool import allocate_states
from qwen4exp_trt.runtime.step_result import StepResult
from qwen4exp_trt.runtime.weights import dtype_from_name

pytestmark = pytest.mark.gpu
LIMITS = {"max_batch_size": 2, "max_seq_len": 256, "prefill_chunk": 64, "block_size": 16}
PAGES = 16
MOE, READ = "layers.1.mlp.moe", "layers.1.mlp_hyper_connection.hc_read"


class ShowingEngine:
    """A program that shows ``marked`` values, each changed by what ``damage`` has for it; its readers get it so."""

    def __init__(
        self, backend: EagerBackend, marked: Iterable[TensorSpec], damage: dict[str, Callable[[Tensor], Tensor]]
    ) -> None:
        self.backend, self.damage = backend, damage
        self.debug_outputs = {
            spec.name: torch.empty(
                [extent_of(dim, backend.limits.largest_step) for dim in spec.shape],
                dtype=dtype_from_name(spec.dtype),
                device=backend.device,
            )
            for spec in marked
        }
        self.program, self.states, self.draft = backend.program, backend.states, None
        backend.watch(self._execute)

    def run_step(self, inputs: Any) -> StepResult:
        return self.backend.run_step(inputs)

    def _execute(self, *args: Any) -> Any:
        engine = self

        class Run(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                result, name = super().run_node(n), path_from_identifier(n.name)
                if name in engine.damage:
                    result = engine.damage[name](result)
                if name in engine.debug_outputs:
                    engine.debug_outputs[name].view(-1)[: result.numel()].copy_(result.reshape(-1))
                return result

        return Run(self.program.module).run(*args)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("marked") / "bundle"
    return bundles.build_for_gpu(output, "bfloat16", mark_plugin_inputs=("*",), draft_head="none", **LIMITS)


def verify(bundle: Path, damage: dict[str, Callable[[Tensor], Tensor]]) -> int:
    """How many values were looked at."""
    manifest, device = Manifest.load(bundle), torch.device("cuda", 0)
    assert len(manifest.debug_outputs) > 50
    options = LoadOptions(num_blocks=2 * PAGES)
    program, other = (load_eager_backend(bundle, manifest, options, device) for _ in range(2))
    states = allocate_states(program.program.states, 2 * PAGES, manifest.limits.num_slots, device)
    watch = LayerWatch(program, manifest.debug_outputs, states, tolerance=1e-3)
    engine, count = ShowingEngine(other, manifest.debug_outputs, damage), 0
    steps = make_steps(manifest.limits, manifest.vocab_size, manifest.config["indexer_budget"] or 0)
    for step, differences in zip(steps, compare(steps, PAGES, program, engine, None, [watch]), strict=True):
        check_layers(step.name, watch)
        check_difference(differences, 1e-3, "")
        count += len(watch.checks)
    return count


def test_an_engine_that_is_right_agrees(bundle: Path) -> None:
    assert verify(bundle, {}) > 500


def test_what_is_wrong_is_named(bundle: Path) -> None:
    def change_last_row(value: Tensor) -> Tensor:
        value = value.clone()
        value[-1] *= 1.1
        return value

    with pytest.raises(BundleError, match=rf"otherwise than the program is {MOE}, bfloat16 \[64, [0-9]+\]") as error:
        verify(bundle, {MOE: change_last_row})
    assert "elements in 1 of 64 rows" in str(error.value) and "error 0 from the program's own run" in str(error.value)


def test_foreign_data_are_recognized(bundle: Path) -> None:
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value.clone())
        return value

    with pytest.raises(BundleError, match=rf"it is what {READ}\.mixed has at the same place"):
        verify(bundle, {f"{READ}.mixed": keep, MOE: lambda value: kept[-1]})
