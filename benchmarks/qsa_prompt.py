"""A prompt through the three ops of QSA at released sizes, by chunks, with selections that neighbours share or not.

The index queries of a passage of 128 tokens are one random vector a head, and ``noise`` times as much that is the
token's own; index keys are random. Neighbouring queries then score the groups alike, as they do in text, and `shared`
says how alike. With ``noise`` infinite no two rows have anything in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, PAGE, RATIO, BUDGET = 24, 2, 256, 64, 4, 2048
INDEX_HEADS, INDEX_DIM, RING, HALF, SECTION, EPS = 4, 128, 11, 32, [11, 11, 10], 1e-6
CHUNK, PASSAGE, MAX_CONTEXT = 8192, 128, 262_144


class Prompt:
    """``length`` tokens, a multiple of the chunk, and their states. ``ops(start)`` are the calls of a chunk."""

    def __init__(self, length: int, noise: float, cache_dtype: torch.dtype = torch.bfloat16, chunk: int = CHUNK):
        self.length, self.chunk = length, min(chunk, length)
        width = INDEX_HEADS * INDEX_DIM
        own = torch.randn(length, width + INDEX_DIM, device="cuda", dtype=torch.bfloat16)
        if not math.isinf(noise):
            passages = torch.randn(-(-length // PASSAGE), width, device="cuda", dtype=torch.bfloat16)
            own[:, :width] = noise * own[:, :width] + passages.repeat_interleave(PASSAGE, 0)[:length]
        self.index_qk = own
        self.qkv = torch.randn(self.chunk, 2 * (HEADS + KV_HEADS) * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        pages = -(-length // PAGE)
        self.table = torch.full((1, MAX_CONTEXT // PAGE), -1, dtype=torch.int32, device="cuda")
        self.table[0, :pages] = torch.randperm(pages, device="cuda")
        self.cache = torch.zeros(pages, 2, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.cache = self.cache.to(cache_dtype)
        self.keys = torch.zeros(pages, PAGE // RATIO, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
        self.rings = (
            torch.zeros(1, RING, INDEX_DIM, device="cuda", dtype=torch.bfloat16),
            torch.zeros(1, RING, 3, device="cuda", dtype=torch.int32),
        )
        self.gains = [torch.rand(width, device="cuda") + 0.5 for width in (HEAD_DIM, HEAD_DIM, INDEX_DIM, INDEX_DIM)]
        self.inv_freq = 1e7 ** (-torch.arange(HALF, device="cuda") / HALF)
        self.starts = torch.tensor([0, self.chunk], dtype=torch.int32, device="cuda")
        self.slots = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.num_seqs = torch.ones(1, dtype=torch.int32, device="cuda")

    def ops(self, start: int) -> dict[str, Callable[..., Tensor]]:
        """Calls of the chunk from ``start`` on: each takes what the one before returns, the indexer nothing."""
        rows = slice(start, start + self.chunk)
        positions = torch.arange(start, start + self.chunk, dtype=torch.int32, device="cuda").expand(3, -1).contiguous()
        lens = torch.tensor([start + self.chunk], dtype=torch.int32, device="cuda")
        batch = (self.starts, lens)
        q_gain, k_gain, index_q_gain, index_k_gain = self.gains
        rope = (positions, self.inv_freq)
        ops = torch.ops.q4e
        return {
            "indexer": lambda: ops.qsa_indexer(
                *(self.index_qk[rows], index_q_gain, index_k_gain, *rope, self.keys, *self.rings),
                *(*batch, self.slots, self.table, self.num_seqs, SECTION, RATIO, EPS),
            ),
            "select": lambda index_q: ops.qsa_select(
                index_q, self.keys, *batch, self.table, self.num_seqs, BUDGET, RATIO
            ),
            "attention": lambda selected: ops.qsa_attention(
                *(self.qkv, q_gain, k_gain, *rope, selected, self.cache),
                *(*batch, self.table, self.num_seqs, HEADS, SECTION, RATIO, EPS),
            ),
        }

    def step(self, start: int) -> Callable[[], Tensor]:
        """One chunk through all three, which returns its selection."""
        ops = self.ops(start)

        def run() -> Tensor:
            selected = ops["select"](ops["indexer"]())
            ops["attention"](selected)
            return selected

        return run

    @property
    def attention_flops(self) -> float:
        """Of the products with keys and values of all heads."""
        dense = min(self.length, BUDGET)
        read = dense * (dense + 1) / 2 + (self.length - dense) * (BUDGET + (RATIO - 1) / 2)
        return 4.0 * HEADS * HEAD_DIM * read

    @property
    def scoring_flops(self) -> float:
        """Of the products of the index queries with the groups that they see."""
        dense = min(self.length, BUDGET)
        return 2.0 * INDEX_HEADS * INDEX_DIM * (self.length**2 - dense**2) / 2 / RATIO


def shared(selected: Tensor, rows: int) -> tuple[float, float]:
    """Of selections ``[T, groups]``: the part that a row shares with the next, and the groups that ``rows`` rows in a
    row select together, over what one selects."""
    overlaps, unions = [], []
    for first in range(0, len(selected) - rows, max(len(selected) // 64, 1)):
        tile = selected[first : first + rows]
        both = torch.isin(tile[0], tile[1]).float().mean()
        overlaps.append(float(both))
        unions.append(len(tile.unique()) / tile.shape[1])
    return sum(overlaps) / len(overlaps), sum(unions) / len(unions)
