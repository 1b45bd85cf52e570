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
from hf_parity import REFERENCE_BOUND, StableTopk, assert_logits_equal, load_reference, relative_error
from torch import Tensor

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "demo" / "checkpoint"
LIMITS = {"max_batch_size": 1, "max_seq_len": 192, "prefill_chunk": 128, "block_size": 24}
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
def test_draft_program_equals_transformers_layer(target: FrozenTarget, heldout: Tensor, tmp_path: Path) -> None:
    """Logits and stack of the bundle's draft program in pieces, over the stack that transformers gives the target."""
    bundle = build_bundle_of_demo(tmp_path / "bundle")
    backend = LLM(bundle, speculate="mtp:1").core.backend
    assert isinstance(backend, EagerBackend) and backend.draft is not None
    tokens, ends = heldout[:161], (100, 132, 133, 137, 145, 160)
    stack = target.run(tokens[None, :160]).stack
    results = []
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        inputs = one_sequence_inputs(tokens[start + 1 : end + 1], start, LIMITS["max_seq_len"] // LIMITS["block_size"])
        results.append(backend.draft.run_step({**inputs, "stack": stack[0, start:end]}))
    head = read_draft_head(CHECKPOINT, target.text_model)
    with StableTopk():
        hidden_states, own = head(stack, target.embed(tokens[None, 1:]), torch.arange(160), causal_mask(160))
    assert_logits_equal(target.model.lm_head(hidden_states)[0], torch.cat([r.logits for r in results]), REFERENCE_BOUND)
    stacks = [result.stack for result in results if result.stack is not None]
    assert relative_error(own[0], torch.cat(stacks)) <= REFERENCE_BOUND


def build_bundle_of_demo(output: Path) -> Path:
    build_bundle(BuildOptions(checkpoint=CHECKPOINT, output=output, activation_dtype="float32", **LIMITS))
    return output


def one_sequence_inputs(token_ids: Tensor, start: int, num_blocks: int) -> dict[str, Tensor]:
    """A step of one sequence that has ``start`` tokens already, in slot 0 and the first pages."""
    end = start + len(token_ids)
    rows = torch.arange(len(token_ids))
    inputs = {
        "input_ids": token_ids,
        "positions": (rows + start).repeat(3, 1),
        "query_start_loc": torch.tensor([0, len(token_ids)]),
        "seq_lens": torch.tensor([end]),
        "slot_ids": torch.tensor([0]),
        "block_table": torch.arange(num_blocks)[None],
        "num_seqs": torch.tensor([1]),
        "logits_indices": rows,
    }
    return {name: value.to(torch.int32) for name, value in inputs.items()}


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
    assert accepted[0] >= 0.58, accepted
