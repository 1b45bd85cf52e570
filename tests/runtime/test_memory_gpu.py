"""Memory and the n-gram table on a GPU: what the plan says holds, and a table on disk gives the same text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import bundles
import pytest
import torch
from serving import generated, ids

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime import memory_plan as memory_plan_module
from qwen4exp_trt.runtime.specs import PleResidency

pytestmark = pytest.mark.gpu
LIMITS = {"max_batch_size": 4, "max_seq_len": 512, "prefill_chunk": 64, "block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[20 + index, 300 - index, 7 * index + 30] * (20 + 30 * index) for index in range(4)]
"""Up to 330 tokens, in chunks of 64, beside decoding."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    for residency in PleResidency:
        bundles.build_for_gpu(folder / residency, "bfloat16", ple_residency=residency, **LIMITS)
    return folder


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU that says that it is integrated, in a machine with as much memory as a test says."""
    real = torch.cuda.get_device_properties(0)
    properties = {name: getattr(real, name) for name in dir(real) if not name.startswith("_")}
    found = SimpleNamespace(**properties | {"is_integrated": True, "available": 64 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
    monkeypatch.setattr(memory_plan_module, "available_memory", lambda: found.available)
    yield found
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_residencies_write_the_same_text(folder: Path) -> None:
    """Also with a cache for few rows, and with rows that were read ahead during the steps before."""
    texts = []
    for residency, cache_bytes in (("device", 0), ("host", 0), ("disk", 0), ("disk", 2**15), ("disk", 2**26)):
        llm = LLM(folder / residency, device="cuda", row_cache_bytes=cache_bytes)
        texts.append([generated(output) for output in llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)])
    assert all(text == texts[0] for text in texts)


def test_what_is_taken_is_within_the_plan(folder: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    llm = LLM(folder / "device", device="cuda")
    llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)
    plan = llm.memory_plan
    assert not plan.is_unified
    assert torch.cuda.memory_reserved() - before < plan.needed(plan.device)


def test_shared_memory_is_not_taken_beyond_what_is_usable(folder: Path, shared_memory: SimpleNamespace) -> None:
    llm = LLM(folder / "device", device="cuda", memory_reserve_bytes=60 * 2**30)
    assert llm.memory_plan.is_unified
    llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
    shared_memory.available = 2**30
    with pytest.raises(BundleError, match="nothing is left of the memory that cuda:0 shares with the host"):
        LLM(folder / "device", device="cuda")
