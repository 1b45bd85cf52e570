"""Decides whether a bundle gets the draft head of its checkpoint, and with which vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from qwen4exp_trt.builder.options import PlanOptions
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.config_rules import check_draft_head
from qwen4exp_trt.frontend.weights import is_of_draft_head
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.generation_config import GenerationConfig
from qwen4exp_trt.runtime.text_file import read_text
from qwen4exp_trt.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class DraftChoice:
    """What a bundle has for drafting."""

    config: ModelConfig
    """Of the model with the draft head that the bundle gets, or without one."""
    token_ids: tuple[int, ...] | None
    """The ids that the draft head can propose, ascending; None if these are all, or there is no draft head."""
    why_none: str
    """Why there is no draft head; empty if there is one."""


def choose_draft_head(options: PlanOptions, config: ModelConfig, checkpoint: Checkpoint | None) -> DraftChoice:
    """What the options ask for and the checkpoint has; without a checkpoint it has what its config says.

    Raises `ConfigError` for a draft head of a kind that is not implemented, and `BuildError` for a vocabulary that
    cannot be had.
    """
    why_none = _why_none(options, config, checkpoint)
    if why_none:
        if options.draft_vocab_size is not None:
            raise BuildError(f"--draft-vocab-size is given, but the bundle gets no draft head: {why_none}")
        return DraftChoice(config.without_draft_head(), None, why_none)
    check_draft_head(config)
    size = options.draft_vocab_size
    if size is None or size == config.vocab_size:
        return DraftChoice(replace(config, draft_vocab_size=None), None, "")
    token_ids = _choose_token_ids(options, config, size)
    return DraftChoice(replace(config, draft_vocab_size=size), token_ids, "")


def _why_none(options: PlanOptions, config: ModelConfig, checkpoint: Checkpoint | None) -> str:
    if options.draft_head == "none":
        return "--draft-head none"
    if not config.has_draft_head:
        return "mtp_num_hidden_layers of the config is 0 or absent"
    if checkpoint is not None and not any(map(is_of_draft_head, checkpoint.names)):
        return "the checkpoint has no tensors mtp.*"
    return ""


def _choose_token_ids(options: PlanOptions, config: ModelConfig, size: int) -> tuple[int, ...]:
    """Ids that end a text and tokens with a meaning of their own; then those that the text has most, if one is given;
    then those that the tokenizer learned first, which a byte-pair encoding does in the order of their frequency."""
    tokenizer = None if options.text_folder is None else Tokenizer.from_dir(options.text_folder)
    needed = list(config.eos_token_ids)
    if options.text_folder is not None:
        needed += GenerationConfig.from_dir(options.text_folder).eos_token_ids
    needed += () if tokenizer is None else tokenizer.added_token_ids
    needed = list(dict.fromkeys(needed))
    if not len(needed) <= size <= config.vocab_size:
        raise BuildError(
            f"--draft-vocab-size is {size}; it must be from {max(len(needed), 1)}, the ids that end a text and the "
            f"tokenizer's added tokens, to the model's vocab_size {config.vocab_size}"
        )
    in_order = [*needed, *_most_frequent(options.draft_vocab, tokenizer), *range(config.vocab_size)]
    return tuple(sorted(list(dict.fromkeys(in_order))[:size]))


def _most_frequent(path: Path | None, tokenizer: Tokenizer | None) -> Iterable[int]:
    """The ids in a text, the most frequent first; of equally frequent ones the lower first."""
    if path is None:
        return []
    text = read_text(path, BuildError)
    if tokenizer is None:
        raise BuildError(f"{path}: to read it the checkpoint needs a tokenizer.json, which it lacks")
    counts = Counter(tokenizer.encode(text, add_special_tokens=False))
    return sorted(counts, key=lambda token: (-counts[token], token))
