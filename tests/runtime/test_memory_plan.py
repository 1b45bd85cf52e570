"""Bundles that are held against the memory of a machine, a device that shares it, and one that has its own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bundles
import pytest
import torch
from serving import loaded_backend

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM, memory_plan
from qwen4exp_trt.runtime.cuda_device import limit_allocations
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import PROGRAM_DIR, DraftHead, Manifest
from qwen4exp_trt.runtime.memory_plan import MemoryPlan, plan_memory
from qwen4exp_trt.runtime.prefix_cache.options import PrefixCacheOptions
from qwen4exp_trt.runtime.program_text import load_program
from qwen4exp_trt.runtime.specs import TensorSpec

MIB, GIB = 2**20, 2**30
FULL_BATCH = bundles.LIMITS["max_batch_size"] * bundles.LIMITS["max_seq_len"] // bundles.LIMITS["block_size"]
OVERHEAD = {"cpu": memory_plan.CPU_OVERHEAD_BYTES, "cuda": memory_plan.GPU_OVERHEAD_BYTES}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the machine has; tests change it."""
    found = SimpleNamespace(available=10 * GIB, total=128 * GIB, is_integrated=True, free_on_gpu=5 * GIB)
    monkeypatch.setattr(memory_plan, "available_memory", lambda: found.available)
    monkeypatch.setattr(memory_plan, "total_memory", lambda: found.total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (found.free_on_gpu, 2 * found.free_on_gpu))
    return found


def plan(bundle: Path, device: str = "cpu", **options: Any) -> MemoryPlan:
    program, manifest = load_program(bundle / PROGRAM_DIR), Manifest.load(bundle)
    return plan_memory([program], manifest, LoadOptions(**options), torch.device(device))


def uses(found: MemoryPlan) -> dict[str, int]:
    return {use.name: use.num_bytes for use in found.uses if use.num_bytes}


def test_the_figures_are_those_of_what_is_loaded(tiny_bundle: Path) -> None:
    llm = LLM(tiny_bundle, num_blocks=5)
    backend = loaded_backend(llm)
    states, found = backend.states, uses(llm.memory_plan)
    assert found["weights"] == sum(weight.nbytes for weight in backend.weights.values())
    assert found["5 pages of 8 tokens"] + found["states of 3 sequences"] == sum(s.nbytes for s in states.values())
    assert found["5 pages of 8 tokens"] == 5 * llm.memory_plan.page_bytes
    assert llm.memory_plan.to_dict()["uses"] == found


def test_debug_outputs_are_counted_for_an_engine(tiny_bundle: Path) -> None:
    """Those of the draft head if it is loaded, each of as many rows as a step can have."""
    program, manifest = load_program(tiny_bundle / PROGRAM_DIR), Manifest.load(tiny_bundle)
    head = DraftHead(
        vocab_size=9,
        has_token_ids=False,
        profiles={},
        debug_outputs=(TensorSpec("mtp.a", ("L", 3), "float32"),),
        passes=[],
    )
    marked = (TensorSpec("a", ("T", 5), "bfloat16"), TensorSpec("b", ("L",), "int64"))
    manifest = replace(manifest, debug_outputs=marked, draft=head)
    limits, options, cpu = manifest.limits, LoadOptions(num_blocks=1), torch.device("cpu")
    own = limits.max_step_tokens * 5 * 2 + limits.max_logits_rows * 8
    for programs, expected in (([program], own), ([program] * 2, own + limits.max_logits_rows * 3 * 4)):
        assert uses(plan_memory(programs, manifest, options, cpu, runs_engine=True))["debug outputs"] == expected
        assert "debug outputs" not in uses(plan_memory(programs, manifest, options, cpu))


def test_a_full_batch_is_the_default_and_the_most(tiny_bundle: Path, machine: SimpleNamespace) -> None:
    assert plan(tiny_bundle).num_blocks == FULL_BATCH
    machine.available = 1000 * GIB
    assert plan(tiny_bundle).num_blocks == FULL_BATCH
    assert plan(tiny_bundle, num_blocks=2).num_blocks == 2


def test_fewer_pages_are_taken_where_memory_is_short(
    tiny_bundle: Path, machine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    full = plan(tiny_bundle, memory_reserve_bytes=0)
    for pages in (FULL_BATCH - 1, 9, 3):
        caplog.clear()
        machine.available = full.needed(full.host) - (FULL_BATCH - pages) * full.page_bytes + MIB
        with caplog.at_level(logging.WARNING):
            assert plan(tiny_bundle, memory_reserve_bytes=MIB).num_blocks == pages
        assert f"for {pages} of the {FULL_BATCH} pages of a full batch: {8 * pages} tokens in all" in caplog.text
        assert ("fewer than one of 64 may have" in caplog.text) == (pages == 3)
    with pytest.raises(BundleError, match=r"(?s)does not fit.*num_blocks=3 \(--num-blocks\) or less"):
        plan(tiny_bundle, memory_reserve_bytes=MIB, num_blocks=4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_bundle_too_large_for_memory_that_is_one(tiny_bundle: Path, machine: SimpleNamespace, device: str) -> None:
    """With a table of figures, and also where CUDA would call more of it free."""
    full = plan(tiny_bundle, device, memory_reserve_bytes=0)
    machine.available = 4 * GIB + OVERHEAD[device] // 2
    with pytest.raises(BundleError) as caught:
        plan(tiny_bundle, device)
    message = str(caught.value)
    weights = uses(full)["weights"] / MIB
    assert f"\nweights: {weights:.2f} MiB;\n" in message and " in all: " in message.replace("\n", " ")
    assert f"where {machine.available / GIB:,.2f} GiB are available less 4.00 GiB in reserve" in message
    assert "--ple-residency disk" in message and "--memory-reserve-bytes" in message
    assert plan(tiny_bundle, device, memory_reserve_bytes=2 * GIB).num_blocks == FULL_BATCH


def test_a_reserve_is_less_on_a_small_machine(tiny_bundle: Path, machine: SimpleNamespace) -> None:
    machine.total = 16 * GIB
    assert plan(tiny_bundle).host.reserve == GIB


def test_a_gpu_with_its_own_memory(tiny_bundle: Path, machine: SimpleNamespace) -> None:
    machine.is_integrated, machine.available = False, 5 * GIB
    found = plan(tiny_bundle, "cuda")
    assert (found.needed(found.device), found.needed(found.host)) == (sum(uses(found).values()), 0)
    machine.free_on_gpu = GIB
    with pytest.raises(BundleError, match=r"too much for the memory of cuda, where 1.00 GiB are available"):
        plan(tiny_bundle, "cuda")


def test_what_stays_on_the_host_counts_there(tiny_bundle: Path, machine: SimpleNamespace) -> None:
    program, manifest = load_program(tiny_bundle / PROGRAM_DIR), Manifest.load(tiny_bundle)
    (table,) = [spec for spec in program.weights if spec.name.endswith("ngram_embedding.weight")]
    manifest.host_weights.append(table.name)
    machine.is_integrated = False
    found = plan_memory([program], manifest, LoadOptions(), torch.device("cuda"))
    assert found.needed(found.host) == table.tensor.num_bytes({})
    machine.available = 4 * GIB
    with pytest.raises(BundleError, match=r"nothing is left of the memory of this machine, where 4\.00 GiB are"):
        plan_memory([program], manifest, LoadOptions(), torch.device("cuda"))


def test_other_uses_count(tiny_bundle: Path, machine: SimpleNamespace) -> None:
    assert plan(tiny_bundle, other_uses={"prefix cache": GIB}).num_blocks == FULL_BATCH
    with pytest.raises(BundleError, match=r"(?s)prefix cache: 6.00 GiB;.*in all: 6\.\d\d GiB"):
        plan(tiny_bundle, other_uses={"prefix cache": 6 * GIB})


def test_the_remedy_is_what_is_too_large(tiny_bundle: Path, machine: SimpleNamespace) -> None:
    caches = PrefixCacheOptions(host_cache_bytes=20 * GIB)
    with pytest.raises(BundleError, match=r"Give a smaller --host-cache-bytes, or free memory$"):
        plan(tiny_bundle, prefix_cache=caches)
    with pytest.raises(BundleError, match=r"Give a smaller --host-cache-bytes, or free memory$"):
        machine.is_integrated = False
        plan(tiny_bundle, "cuda", prefix_cache=caches)
    with pytest.raises(
        BundleError, match=r"nothing is left .* 10\.00 GiB are available less 11\.00 GiB in reserve; fre"
    ):
        plan(tiny_bundle, memory_reserve_bytes=11 * GIB)


def test_it_is_refused_before_anything_is_read(
    tiny_bundle: Path, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("open_weight_files", "allocate_states", "load_weights"):
        monkeypatch.setattr(f"qwen4exp_trt.runtime.backend.{name}", None)
    machine.available = 4 * GIB
    with pytest.raises(BundleError, match="nothing is left of the memory of this machine"):
        LLM(tiny_bundle)


def test_torch_gets_no_more_of_shared_memory_than_is_usable(
    tiny_bundle: Path, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    machine.total_memory = 20 * GIB
    limit_allocations(plan(tiny_bundle, "cuda"), torch.device("cuda"))
    assert fractions == [(1 + 10 - 4) / 20]
    machine.is_integrated = False
    limit_allocations(plan(tiny_bundle, "cuda"), torch.device("cuda"))
    limit_allocations(plan(tiny_bundle), torch.device("cpu"))
    assert len(fractions) == 1


@pytest.mark.parametrize("options", [{"row_cache_bytes": -1}, {"memory_reserve_bytes": "4GiB"}])
def test_bad_sizes(tiny_bundle: Path, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(BundleError, match=f"{name} is {value!r}; it must be a number of bytes, 0 or more"):
        LLM(tiny_bundle, **options)
