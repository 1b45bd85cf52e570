from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import pytest
from tiny_tokenizer import tiny_backend

from qwen4exp_trt.builder.text_files import TEXT_FILES, TextFiles
from qwen4exp_trt.errors import BundleError, CheckpointError
from qwen4exp_trt.frontend.config import ModelConfig

CONFIG = ModelConfig.from_dict(bundles.config_dict(), "the test")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    bundles.write_text_files(folder)
    (folder / "README.md").write_text("not for the bundle")
    return folder


def test_files_are_copied_and_eos_ids_joined(checkpoint: Path, tmp_path: Path) -> None:
    write_generation_config({"eos_token_id": bundles.IM_END})(checkpoint)
    found = TextFiles.from_dir(checkpoint, CONFIG)
    assert found.stop_token_ids == (bundles.IM_END, bundles.ENDOFTEXT)
    (tmp_path / "copy").mkdir()
    found.copy_to(tmp_path / "copy")
    copied = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert copied == {name: (checkpoint / name).read_bytes() for name in TEXT_FILES}


def test_checkpoint_without_any(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        assert TextFiles.from_dir(folder, CONFIG) == TextFiles((), (bundles.ENDOFTEXT,))


def write_other_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")


def write_generation_config(content: Any) -> Any:
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json is not a tokenizer that"),
        (write_other_tokenizer, "has vocab.json but no tokenizer.json, the only tokenizer format read here"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json: holds a list"),
        (write_generation_config([]), "generation_config.json: holds a list"),
        (write_generation_config({"do_sample": True, "top_p": 2}), "SamplingParams.top_p is 2"),
    ],
    ids=["damaged tokenizer", "no tokenizer.json", "tokenizer config", "generation config", "sampling"],
)
def test_what_the_runtime_would_refuse(checkpoint: Path, damage: Any, message: str) -> None:
    damage(checkpoint)
    with pytest.raises(BundleError, match=message):
        TextFiles.from_dir(checkpoint, CONFIG)


def test_tokenizer_of_another_model(checkpoint: Path) -> None:
    largest = tiny_backend().get_vocab_size() - 1
    TextFiles.from_dir(checkpoint, replace(CONFIG, vocab_size=largest + 1))
    with pytest.raises(CheckpointError, match=f"ids up to {largest}, but the model's vocab_size is {largest}; it"):
        TextFiles.from_dir(checkpoint, replace(CONFIG, vocab_size=largest))


def test_eos_outside_the_vocabulary(checkpoint: Path) -> None:
    write_generation_config({"eos_token_id": [2, 384]})(checkpoint)
    with pytest.raises(CheckpointError, match=r"eos_token_id \[384\] are not below the model's vocab_size 384"):
        TextFiles.from_dir(checkpoint, CONFIG)
