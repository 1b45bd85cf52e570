"""The demo checkpoint's draft head: its layout, the form that it was trained in, and what it is worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from demo_checkpoint import read_draft_head
from demo_draft_evaluation import accept_heldout
from demo_draft_head import causal_mask
from demo_draft_training import ChainedDrafts, FrozenTarget
from hf_parity import REFERENCE_BOUND, StableTopk, assert_logits_equal, load_reference
from torch import Tensor

from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "demo" / "checkpoint"
RELEASED_CONFIG = ROOT / "tests" / "fixtures" / "released_config.json"


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(load_reference(CHECKPOINT, "float32"))


@pytest.fixture(scope="module")
def heldout() -> Tensor:
    text = (ROOT / "demo" / "heldout.txt").read_text(encoding="utf-8")
    return torch.tensor(Tokenizer.from_dir(CHECKPOINT).encode(text, add_special_tokens=False))


def test_head_is_laid_out_as_released() -> None:
    checkpoint = Checkpoint.open(CHECKPOINT)
    names = [name for name in checkpoint.names if name.startswith("mtp.")]
    assert len(names) == 31
    assert {checkpoint.dtype(name) for name in names} == {"BF16"}
    ours, released = (
        json.loads(path.read_text())["text_config"] for path in (CHECKPOINT / "config.json", RELEASED_CONFIG)
    )
    rope_theta = {"rope_theta": ours["rope_parameters"]["rope_theta"]}
    assert ours["mtp"] == released["mtp"] | rope_theta
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        assert ours[key] == released[key]


@torch.no_grad()
def test_trained_form_equals_transformers_layer(target: FrozenTarget, heldout: Tensor) -> None:
    """Beyond the indexer's budget, where the training form selects with one masked top-k."""
    tokens = heldout[None, :164]
    stack = target.run(tokens).stack[:, :160]
    (ours,) = ChainedDrafts(read_draft_head(CHECKPOINT, target.text_model), target).run(tokens, stack, steps=1)
    head = read_draft_head(CHECKPOINT, target.text_model)
    with StableTopk():
        hidden_states, _ = head(stack, target.embed(tokens[:, 1:161]), torch.arange(160), causal_mask(160))
    assert_logits_equal(target.model.lm_head(hidden_states)[0], ours[0], REFERENCE_BOUND)


def test_target_accepts_most_drafts(target: FrozenTarget, heldout: Tensor) -> None:
    drafts = ChainedDrafts(read_draft_head(CHECKPOINT, target.text_model), target)
    accepted = accept_heldout(drafts, heldout[:1040])["greedy"]
    assert accepted[0] >= 0.45, accepted
