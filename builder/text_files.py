"""The files of a checkpoint that turn text into tokens and back, which a bundle takes along."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime.chat_template import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, ChatTemplate
from qwen4exp_trt.runtime.generation_config import GENERATION_CONFIG_FILE, GenerationConfig
from qwen4exp_trt.runtime.tokenizer import TOKENIZER_FILE, Tokenizer

TEXT_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, GENERATION_CONFIG_FILE)


@dataclass(frozen=True)
class TextFiles:
    """Those of `TEXT_FILES` that the checkpoint has, and all ids that end a text."""

    paths: tuple[Path, ...]
    stop_token_ids: tuple[int, ...]
    """Those of the generation config, which chat models list there, and of the config."""

    @classmethod
    def from_dir(cls, folder: Path | None, config: ModelConfig) -> TextFiles:
        """Read the files of ``folder`` (None for no files) as the runtime will, so that the build refuses bad ones."""
        if folder is None:
            return cls((), config.eos_token_ids)
        tokenizer, eos_token_ids = Tokenizer.from_dir(folder), GenerationConfig.from_dir(folder).eos_token_ids
        ChatTemplate.from_dir(folder)
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"{folder / TOKENIZER_FILE} has ids up to {tokenizer.vocab_size - 1}, but the model's vocab_size is "
                f"{config.vocab_size}; it belongs to another model"
            )
        if bad := [token for token in eos_token_ids if token >= config.vocab_size]:
            raise CheckpointError(
                f"{folder / GENERATION_CONFIG_FILE}: eos_token_id {bad} are not below the model's vocab_size "
                f"{config.vocab_size}"
            )
        paths = tuple(path for name in TEXT_FILES if (path := folder / name).is_file())
        return cls(paths, tuple(dict.fromkeys((*eos_token_ids, *config.eos_token_ids))))

    def copy_to(self, folder: Path) -> None:
        for path in self.paths:
            shutil.copyfile(path, folder / path.name)
