"""A byte-level BPE tokenizer small enough to train in a test, with special and other added tokens."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = ("<think>", "</think>", "with space", "Überschrift 1")
"""Added tokens that are not special; the last two are not spelled in the byte-level alphabet."""

_TEXT = "the quick brown fox jumps over the lazy dog; naïve café, 你好世界, 🙂🙂 and the the the user assistant\n"


@cache
def _trained_json() -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT] * 4, trainer)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED_TOKENS])
    return backend.to_str()


def tiny_backend() -> tokenizers.Tokenizer:
    """A fresh copy, which a test may change."""
    return tokenizers.Tokenizer.from_str(_trained_json())
