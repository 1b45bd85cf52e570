from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bundles
import pytest
from serving import assert_idle

from qwen4exp_trt.runtime import LLM


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 bundle of a random model, with tokenizer, chat template and generation config."""
    base = tmp_path_factory.getbasetemp()
    return bundles.build(bundles.tiny_checkpoint(base / "tiny-checkpoint"), base / "tiny-float32")


@pytest.fixture(scope="session")
def tiny_llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle)


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """The tiny model; each test leaves it idle."""
    yield tiny_llm
    assert_idle(tiny_llm)


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BF16 bundle of the demo checkpoint, with its engine."""
    output = tmp_path_factory.getbasetemp() / "demo"
    return bundles.build(bundles.DEMO_CHECKPOINT, output, activation_dtype="bfloat16", max_seq_len=256, block_size=16)


@pytest.fixture(scope="session")
def demo_llm(demo_bundle: Path) -> LLM:
    return LLM(demo_bundle)


@pytest.fixture(scope="session")
def mtp_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float32 bundle of a random model with a draft head."""
    base = tmp_path_factory.getbasetemp()
    checkpoint = bundles.mtp_checkpoint(base)
    return bundles.build(checkpoint, base / "tiny-mtp", max_batch_size=4)
