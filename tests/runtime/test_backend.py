from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen4exp_trt.errors import BundleError, CheckpointError
from qwen4exp_trt.runtime.backend import open_checkpoint
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.manifest import CheckpointRef
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateKind, StateSpec
from qwen4exp_trt.runtime.state_pool import allocate_states

BUNDLE = Path("a-bundle")


def write_checkpoint(folder: Path, size: int = 4, value: float = 0.0) -> CheckpointRef:
    folder.mkdir(parents=True)
    save_file({"w": torch.full((size,), value)}, folder / "model.safetensors")
    return CheckpointRef(str(folder), Checkpoint.open(folder).identity())


def test_states_have_the_extents_of_their_pools_and_their_initial_values() -> None:
    specs = (
        StateSpec("paged", StateKind.KV_CACHE, 0, (NUM_BLOCKS, 8, 2), "bfloat16"),
        StateSpec("ids", StateKind.NGRAM_IDS, 1, (NUM_SLOTS, 2), "int32", init=-1),
    )
    states = allocate_states(specs, num_blocks=5, num_slots=3)
    assert {name: (tuple(state.shape), state.dtype) for name, state in states.items()} == {
        "paged": ((5, 8, 2), torch.bfloat16),
        "ids": ((3, 2), torch.int32),
    }
    assert not states["paged"].any()
    assert (states["ids"] == -1).all()


@pytest.mark.parametrize("num_blocks", [2**50, 2**62])
def test_states_that_do_not_fit_in_memory(num_blocks: int) -> None:
    spec = StateSpec("paged", StateKind.KV_CACHE, 0, (NUM_BLOCKS, 8, 2), "bfloat16")
    with pytest.raises(
        BundleError, match=rf"GiB on cpu for the states of 3 sequences and {num_blocks} pages; load the"
    ):
        allocate_states((spec,), num_blocks, num_slots=3)


def test_checkpoint_is_opened_where_it_was_or_is_said_to_be(tmp_path: Path) -> None:
    ref = write_checkpoint(tmp_path / "old")
    assert open_checkpoint(BUNDLE, ref, None).path == tmp_path / "old"
    (tmp_path / "old").rename(tmp_path / "new")
    assert open_checkpoint(BUNDLE, ref, tmp_path / "new").path == tmp_path / "new"


def test_moved_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    ref = CheckpointRef(str(tmp_path / "gone"), {})
    with pytest.raises(BundleError, match=r"no longer at .*gone; say where it is now with --checkpoint \(checkpoint="):
        open_checkpoint(BUNDLE, ref, None)
    with pytest.raises(CheckpointError, match="elsewhere: no such folder"):
        open_checkpoint(BUNDLE, ref, tmp_path / "elsewhere")


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    ref = write_checkpoint(tmp_path / "a")
    write_checkpoint(tmp_path / "b", size=5)
    with pytest.raises(CheckpointError, match=r"b is not the checkpoint that was expected: model\.safetensors has"):
        open_checkpoint(BUNDLE, ref, tmp_path / "b")


def test_a_fine_tune_is_refused(tmp_path: Path) -> None:
    """Trap: every name, shape, dtype and size of it is right."""
    ref = write_checkpoint(tmp_path / "a")
    write_checkpoint(tmp_path / "b", value=1e-3)
    with pytest.raises(
        CheckpointError, match=r"b is not the checkpoint .*model\.safetensors has the same size but other"
    ):
        open_checkpoint(BUNDLE, ref, tmp_path / "b")


def test_bundle_without_weights() -> None:
    with pytest.raises(BundleError, match="built with --config-only, so it has no weights"):
        open_checkpoint(BUNDLE, None, None)
