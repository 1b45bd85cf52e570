"""Slow oracle: one row at a time in Python numbers, over a sorted list of all tokens."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def philox_word(seed: int, token_id: int, offset: int) -> int:
    """Word ``token_id % 4`` of Philox4x32-10 with the counter ``(token_id // 4, offset, 0, 0)``."""
    words, key = [token_id // 4, offset % 2**32, 0, 0], [seed % 2**32, seed // 2**32 % 2**32]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [second >> 32 ^ words[1] ^ key[0], second % 2**32, first >> 32 ^ words[3] ^ key[1], first % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return words[token_id % 4]


def exponential(seed: int, token_id: int, offset: int) -> float:
    uniform = min((philox_word(seed, token_id, offset) + 0.5) / 2**32, 1 - 2**-24)
    return -math.log1p(-uniform)


def kept(values: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[tuple[int, float]]:
    """Ids and scaled logits of the tokens that may be sampled, those included that tie with the last one kept."""
    best = max(values)
    # Float32, as which of them are equal depends on it.
    scaled = [float(np.float32(np.float32(value - best) / np.float32(temperature))) for value in values]
    ranked = sorted(scaled, reverse=True)[: top_k if top_k > 0 else None]
    ranked = [value for value in ranked if min_p == 0 or value >= math.log(min_p)]
    total, before, lowest = math.fsum(map(math.exp, ranked)), 0.0, 0.0
    for value in ranked:
        if top_p < 1 and before >= top_p * total:
            break
        lowest, before = value, before + math.exp(value)
    return [(token_id, value) for token_id, value in enumerate(scaled) if value >= lowest]


def reference(
    logits: Tensor,
    raw_logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    offsets: Tensor,
    vocab_limit: int,
) -> tuple[Tensor, Tensor, Tensor]:
    count, vocab_size = logits.shape
    num_ids = vocab_limit if 0 < vocab_limit < vocab_size else vocab_size
    token_ids, logprobs, ranks = torch.full((count,), -1).int(), torch.zeros(count), torch.zeros(count).int()
    for row in range(count):
        values, raw = logits[row, :num_ids].tolist(), raw_logits[row].tolist()
        if any(math.isnan(x) or x == math.inf for x in raw) or max(raw) == -math.inf or max(values) == -math.inf:
            continue
        temperature, seed, offset = float(temperatures[row]), int(seeds[row]), int(offsets[row])
        if temperature > 0:
            tokens = kept(values, temperature, int(top_k[row]), float(top_p[row]), float(min_p[row]))
            race = {token: value - math.log(exponential(seed, token, offset)) for token, value in tokens}
            token = max(race, key=lambda t: race[t])
        else:
            token = values.index(max(values))
        token_ids[row] = token
        logprobs[row] = raw[token] - max(raw) - math.log(math.fsum(math.exp(x - max(raw)) for x in raw))
        ranks[row] = 1 + sum(x > raw[token] for x in raw[:num_ids])
    return token_ids, logprobs, ranks
