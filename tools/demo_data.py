"""Token stream of the demo corpus."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from demo_chat import make_chats
from demo_corpus import Corpus
from demo_training import Loops
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
CHATS = 3600
"""About a tenth of the training tokens."""


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: Iterable[str]) -> np.ndarray:
    """Token ids, uint16, each document followed by the end-of-text token."""
    backend = tokenizer.backend_tokenizer
    encodings = backend.encode_batch([document + END_OF_TEXT for document in documents])
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])


def encode_training_stream(tokenizer: PreTrainedTokenizerFast, corpus: Corpus, rng: random.Random) -> np.ndarray:
    """All training documents and chats in random order; chats are grouped by ten between documents."""
    chats = [
        str(tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=thinking)).removesuffix("\n")
        for messages, thinking in make_chats(corpus.novels, CHATS, rng)
    ]
    groups: Sequence[str] = [END_OF_TEXT.join(chats[start : start + 10]) for start in range(0, len(chats), 10)]
    documents = [*corpus.novels, *corpus.bible, *groups]
    rng.shuffle(documents)
    return encode_documents(tokenizer, documents)


@dataclass(frozen=True)
class WindowSampler:
    """Random windows of a token stream, drawn on the device that holds it."""

    stream: Tensor
    generator: torch.Generator

    def draw_windows(self, count: int, length: int) -> Tensor:
        """`count` rows of `length` + 1 consecutive tokens."""
        return self._gather(count, torch.arange(length + 1, device=self.stream.device))

    def draw_loops(self, count: int, length: int) -> Loops:
        """`count` rows that begin as text and then repeat a passage of 6 to 48 tokens."""
        start = length // 4
        period = int(torch.randint(6, 49, (), generator=self.generator, device=self.stream.device))
        position = torch.arange(length + 1, device=self.stream.device)
        repeated = start - period + (position - start) % period
        return Loops(self._gather(count, torch.where(position < start, position, repeated)), start, period)

    def _gather(self, count: int, positions: Tensor) -> Tensor:
        last = self.stream.numel() - len(positions)
        offsets = torch.randint(last, (count, 1), generator=self.generator, device=self.stream.device)
        return self.stream[offsets + positions]


def cut_windows(tokens: Tensor, length: int) -> Tensor:
    """Rows of `length` + 1 tokens that share their borders, so that each token but the first is predicted once."""
    whole = (tokens.numel() - 1) // length * length + 1
    return tokens[:whole].unfold(0, length + 1, length)
