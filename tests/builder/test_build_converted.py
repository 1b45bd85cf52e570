"""Builds that convert weights, and what reads the converted files later."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from build_command import FLOAT32, Capture, refused, tree
from conversions import contents

from qwen4exp_trt.builder import convert as convert_module
from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.options import DEFAULT_WEIGHTS_DIR
from qwen4exp_trt.errors import Q4eError
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.manifest import Manifest

NVFP4 = [*FLOAT32, "--precision", "nvfp4", "--ple", "nvfp4"]


@pytest.fixture(autouse=True)
def _few_files(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are not compiled here, and tables not cut into many files."""
    monkeypatch.setattr(convert_module, "_MAX_TABLE_FILES", 4)


def build(checkpoint: Path, output: Path, *argv: str) -> None:
    assert main([str(checkpoint), "-o", str(output), *NVFP4, *argv]) == 0


def counts(capsys: Capture) -> tuple[int, int]:
    """Files that were there, and files that were needed."""
    found = re.search(r"converted weights +(\d+) of (\d+) files are in ", capsys.readouterr().out)
    assert found is not None
    return int(found[1]), int(found[2])


@pytest.fixture
def built(checkpoint: Path, tmp_path: Path) -> Path:
    build(checkpoint, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_later_builds_find_the_files_again(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    build(checkpoint, tmp_path / "a")
    there, needed = counts(capsys)
    assert there == 0 < needed
    before = tree(tmp_path / DEFAULT_WEIGHTS_DIR)
    assert len(before) == needed
    for output in ("a", "b"):
        build(checkpoint, tmp_path / output)
        assert counts(capsys) == (needed, needed)
    assert tree(tmp_path / DEFAULT_WEIGHTS_DIR) == before
    assert Manifest.load(tmp_path / "a").converted == Manifest.load(tmp_path / "b").converted
    build(checkpoint, tmp_path / "elsewhere" / "a")
    assert counts(capsys) == (0, needed)
    build(checkpoint, tmp_path / "c", "--weights-dir", str(tmp_path / "elsewhere" / DEFAULT_WEIGHTS_DIR))
    assert counts(capsys) == (needed, needed)
    build(checkpoint, tmp_path / "d", "--keep", "lm_head.*")
    assert counts(capsys) == (needed - 1, needed - 1)


def test_without_conversions_there_is_no_folder(checkpoint: Path, tmp_path: Path) -> None:
    assert main([str(checkpoint), "-o", str(tmp_path / "bundle"), *FLOAT32]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert Manifest.load(tmp_path / "bundle").converted is None


def test_an_interrupted_build_leaves_whole_files_and_no_bundle(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saved = convert_module.save_file, []

    def interrupt(*args: object) -> None:
        if len(saved) == 3:
            raise KeyboardInterrupt
        saved.append(args)
        save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(convert_module, "save_file", interrupt)
    assert main([str(checkpoint), "-o", str(tmp_path / "bundle"), *NVFP4]) == 130
    assert [path.name for path in tmp_path.iterdir()] == [DEFAULT_WEIGHTS_DIR]
    finished = contents(tmp_path / DEFAULT_WEIGHTS_DIR)
    assert len(finished) == 3 and all(name.endswith(".safetensors") for name in finished)
    monkeypatch.setattr(convert_module, "save_file", save)
    build(checkpoint, tmp_path / "bundle")
    assert finished.items() < contents(tmp_path / DEFAULT_WEIGHTS_DIR).items()


# --- damage ---------------------------------------------------------------------------------------------------------


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def exchange(path: Path, other: Path) -> None:
    shutil.copyfile(other, path)


def flip_a_bit(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove(path: Path, other: Path) -> None:
    path.unlink()


Damage = Callable[[Path, Path], None]


def damage_one(bundle: Path, damage: Damage) -> Path:
    path, other, *_ = sorted((bundle.parent / DEFAULT_WEIGHTS_DIR).iterdir())
    damage(path, other)
    return path


@pytest.mark.parametrize("damage", [truncate, exchange])
def test_a_build_refuses_a_damaged_file(built: Path, checkpoint: Path, capsys: Capture, damage: Damage) -> None:
    path = damage_one(built, damage)
    capsys.readouterr()
    message = refused(capsys, built.parent, checkpoint, "-o", built, *NVFP4)
    assert message.startswith(f"qwen4exp-build: error: {path}: ")
    assert message.endswith("; remove it and build the bundle again\n")
    path.unlink()
    build(checkpoint, built)


def test_a_build_makes_a_missing_file_again(built: Path, checkpoint: Path) -> None:
    before = contents(built.parent / DEFAULT_WEIGHTS_DIR)
    damage_one(built, remove)
    build(checkpoint, built)
    assert contents(built.parent / DEFAULT_WEIGHTS_DIR) == before


@pytest.mark.parametrize("damage", [truncate, exchange, flip_a_bit, remove])
def test_loading_refuses_a_damaged_file(built: Path, damage: Damage) -> None:
    LLM(built).generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=1))
    path = damage_one(built, damage)
    with pytest.raises(Q4eError) as caught:
        LLM(built)
    message = str(caught.value)
    assert str(path.parent) in message and path.name in message and "build the bundle again" in message
    assert "\n" not in message


def test_files_that_were_made_again_are_those_of_the_bundle(built: Path, checkpoint: Path) -> None:
    """A bundle of before goes on working when its converted weights are removed and another build makes them again."""
    shutil.rmtree(built.parent / DEFAULT_WEIGHTS_DIR)
    build(checkpoint, built.with_name("other"))
    assert LLM(built).generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=1))
