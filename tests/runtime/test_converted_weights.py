"""Bundles whose weights are partly in files that their build converted: moved, damaged, and of another checkpoint."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import bundles
import pytest
import torch
from quantized_checkpoints import write_quantized

from qwen4exp_trt.errors import BundleError, CheckpointError
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.manifest import Manifest

TOKENS = [5, 9, 300, 17, 4, 4, 8, 250, 33, 7, 12]


@dataclass(frozen=True)
class Converted:
    """A bundle beside its folder of converted weights, and the logits that it gives."""

    bundle: Path
    folder: Path
    logits: torch.Tensor

    @property
    def files(self) -> list[str]:
        ref = Manifest.load(self.bundle).converted
        assert ref is not None and Path(ref.path).name == self.folder.name
        return sorted(ref.files)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    base = tmp_path_factory.getbasetemp()
    checkpoint = bundles.tiny_checkpoint(base / "tiny-checkpoint")
    folder = tmp_path_factory.mktemp("original")
    bundle = bundles.build(checkpoint, folder / "bundle", precision="nvfp4")
    return Converted(bundle, folder / "converted-weights", LLM(bundle).score(TOKENS))


@pytest.fixture
def moved(original: Converted, tmp_path: Path) -> Converted:
    """Both copied elsewhere; the bundle's record of where they were leads nowhere."""
    for folder in (original.bundle, original.folder):
        shutil.copytree(folder, tmp_path / folder.name)
    text = (original.bundle / "manifest.json").read_text()
    changed = text.replace(str(original.folder), str(tmp_path / "gone" / original.folder.name))
    (tmp_path / "bundle" / "manifest.json").write_text(changed)
    return Converted(tmp_path / "bundle", tmp_path / original.folder.name, original.logits)


def refused(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught:
        LLM(bundle)
    assert "\n" not in str(caught.value) and str(bundle) in str(caught.value)
    return str(caught.value)


def test_files_of_other_bundles_in_the_folder_do_not_matter(original: Converted) -> None:
    (original.folder / "other.safetensors").write_text("of another bundle, and damaged")
    assert torch.equal(LLM(original.bundle).score(TOKENS), original.logits)


def test_a_bundle_moves_with_its_folder(moved: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(LLM(moved.bundle).score(TOKENS), moved.logits)
    monkeypatch.chdir(moved.bundle)
    assert torch.equal(LLM(".").score(TOKENS), moved.logits)
    (tmp_path / "gone").mkdir()
    moved.folder.rename(tmp_path / "gone" / moved.folder.name)
    assert torch.equal(LLM(moved.bundle).score(TOKENS), moved.logits), "where the build recorded it"


def test_a_missing_folder_is_named_with_both_places(moved: Converted, tmp_path: Path) -> None:
    shutil.rmtree(moved.folder)
    places = f"not at {tmp_path / 'gone' / moved.folder.name} or {moved.folder}"
    assert f"its converted weights are {places}; move them there, or build" in refused(moved.bundle)


def test_missing_and_changed_files_are_named(moved: Converted) -> None:
    missing, changed, truncated, last = (moved.folder / name for name in (*moved.files[:3], moved.files[-1]))
    missing.unlink()
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    size = truncated.stat().st_size
    os.truncate(truncated, size - 1)
    last.write_bytes(b"")
    message = refused(moved.bundle)
    assert f"its converted weights in {moved.folder} are not those that it was built with: " in message
    assert f"{missing.name} is missing, {changed.name} has the same size but other content, " in message
    assert f"{truncated.name} has {size - 1:,} bytes instead of {size:,}, {last.name} has 0 bytes instead" in message
    assert message.endswith("; remove such files and build the bundle again")


def test_what_the_message_says_to_do_helps(moved: Converted, tmp_path: Path) -> None:
    """A later build makes the files that are missing, and no others."""
    ref = Manifest.load(moved.bundle).checkpoint
    assert ref is not None
    (moved.folder / moved.files[0]).unlink()
    kept = {name: (moved.folder / name).stat().st_mtime_ns for name in moved.files[1:]}
    bundle = bundles.build(Path(ref.path), tmp_path / "bundle", precision="nvfp4")
    assert {name: (moved.folder / name).stat().st_mtime_ns for name in moved.files[1:]} == kept
    assert torch.equal(LLM(bundle).score(TOKENS), moved.logits)


def test_an_nvfp4_checkpoint_is_not_exchanged_for_another_of_the_same_shapes(tmp_path: Path) -> None:
    """Neither where its weights are kept, nor where some are converted."""
    for name, seed in (("ours", 2), ("other", 3)):
        write_quantized(tmp_path / name, "mixed precision", bundles.config_dict(), seed)
    kept = bundles.build(tmp_path / "ours", tmp_path / "kept")
    converted = bundles.build(tmp_path / "ours", tmp_path / "converted", precision="nvfp4")
    for bundle in (kept, converted):
        assert LLM(bundle, checkpoint=tmp_path / "ours").score(TOKENS).isfinite().all()
        with pytest.raises(CheckpointError, match=r"other is not the checkpoint .* the same size but other content"):
            LLM(bundle, checkpoint=tmp_path / "other")
    before = {path.name for path in (tmp_path / "converted-weights").iterdir()}
    again = bundles.build(tmp_path / "other", tmp_path / "again", precision="nvfp4")
    made = Manifest.load(again).converted
    assert made is not None and made.files and not before & made.files.keys(), "no file of the other one is reused"
