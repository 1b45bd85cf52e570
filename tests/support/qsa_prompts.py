"""Prompts through the three ops of QSA at released sizes on a GPU, in steps of any size, and float32 beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from op_checks import rms_error
from torch import Tensor

from qwen4exp_trt.plugins.number_formats import e4m3_from_float
from qwen4exp_trt.plugins.numerics import rms_norm, rotary_angles, rotate
from qwen4exp_trt.plugins.qsa_attention.reference import visible_keys
from qwen4exp_trt.plugins.registry import all_specs

all_specs()  # registers the ops
HEADS, KV_HEADS, HEAD_DIM, PAGE, RATIO, BUDGET = 24, 2, 256, 64, 4, 2048
INDEX_HEADS, INDEX_DIM, RING, HALF, SECTION, EPS = 4, 128, 11, 32, [11, 11, 10], 1e-6
TOPIC = 128
"""Tokens whose index queries are alike."""


class Prompts:
    """``lengths`` new tokens behind ``contexts``, whose caches are random. A context is a multiple of the ratio."""

    def __init__(
        self,
        lengths: Sequence[int],
        contexts: Sequence[int] | None = None,
        noise: float = 0.3,
        cache_dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        g = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, device="cuda").bfloat16()

        self.lengths, self.contexts = list(lengths), list(contexts or [0] * len(lengths))
        ends = [length + context for length, context in zip(self.lengths, self.contexts, strict=True)]
        self.qkv = [normal(length, 2 * (HEADS + KV_HEADS) * HEAD_DIM) for length in lengths]
        self.index_qk = [normal(length, (INDEX_HEADS + 1) * INDEX_DIM) for length in lengths]
        for rows in self.index_qk:
            queries = rows[:, : INDEX_HEADS * INDEX_DIM]
            topics = normal(len(rows) // TOPIC + 1, INDEX_HEADS * INDEX_DIM).repeat_interleave(TOPIC, 0)
            queries.mul_(noise).add_(topics[: len(rows)])
        pages = [-(-end // PAGE) for end in ends]
        order = torch.randperm(sum(pages), generator=g, device="cuda").int()
        self.table = torch.full((len(ends), max(pages) + 1), -1, dtype=torch.int32, device="cuda")
        for b, part in enumerate(order.split(pages)):
            self.table[b, : len(part)] = part
        cache = normal(sum(pages), 2, PAGE, KV_HEADS, HEAD_DIM)
        self.initial = (
            e4m3_from_float(cache) if cache_dtype == torch.float8_e4m3fn else cache,
            normal(sum(pages), PAGE // RATIO, INDEX_DIM),
            normal(len(ends), RING, INDEX_DIM),
            torch.zeros(len(ends), RING, 3, dtype=torch.int32, device="cuda"),
        )
        self.gains = [torch.rand(width, generator=g, device="cuda") + 1 for width in (HEAD_DIM,) * 2 + (INDEX_DIM,) * 2]
        self.inv_freq = 1e7 ** (-torch.arange(HALF, device="cuda") / HALF)

    def run(self, *steps: Sequence[int]) -> None:
        """From the contexts on, each step with so many new tokens of each prompt."""
        self.states = [state.clone() for state in self.initial]
        done = [0] * len(self.lengths)
        parts: list[list[tuple[Tensor, ...]]] = [[] for _ in done]
        for counts in steps:
            outputs = self._step(done, counts)
            for b, rows in enumerate(zip(*[output.split(list(counts)) for output in outputs], strict=True)):
                parts[b].append(rows)
            done = [d + count for d, count in zip(done, counts, strict=True)]
        assert done == self.lengths
        self.index_q, self.selected, self.out = (
            [torch.cat([rows[i] for rows in of_prompt]) for of_prompt in parts] for i in range(3)
        )

    def _step(self, done: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        spans = [slice(start, start + count) for start, count in zip(done, counts, strict=True)]
        positions = torch.cat(
            [torch.arange(s.start, s.stop) + c for s, c in zip(spans, self.contexts, strict=True)]
        ).to("cuda", torch.int32)
        positions = positions.expand(3, -1).contiguous()
        starts = torch.tensor([0, *counts]).cumsum(0).int().cuda()
        lens = torch.tensor([s.stop + c for s, c in zip(spans, self.contexts, strict=True)]).int().cuda()
        slots, num_seqs = torch.arange(len(counts)).int().cuda(), torch.tensor([len(counts)]).int().cuda()
        index_qk, qkv = (
            torch.cat([rows[span] for rows, span in zip(prompts, spans, strict=True)])
            for prompts in (self.index_qk, self.qkv)
        )
        cache, keys, ring, position_ring = self.states
        q_gain, k_gain, index_q_gain, index_k_gain = self.gains
        rope = (positions, self.inv_freq)
        index_q = torch.ops.q4e.qsa_indexer(
            *(index_qk, index_q_gain, index_k_gain, *rope, keys, ring, position_ring),
            *(starts, lens, slots, self.table, num_seqs, SECTION, RATIO, EPS),
        )
        selected = torch.ops.q4e.qsa_select(index_q, keys, starts, lens, self.table, num_seqs, BUDGET, RATIO)
        out = torch.ops.q4e.qsa_attention(
            *(qkv, q_gain, k_gain, *rope, selected, cache),
            *(starts, lens, self.table, num_seqs, HEADS, SECTION, RATIO, EPS),
        )
        return index_q, selected, out

    def check(self, prompt: int, rows: Sequence[int], tolerance: float) -> None:
        """The selections and outputs of some rows against float32 over what is in the caches."""
        index_keys = self.states[1][self.table[prompt].clamp_min(0).long()].flatten(0, 1).double()
        expected = []
        for row in rows:
            position = self.contexts[prompt] + row
            visible, selected = (position + 1) // RATIO, self.selected[prompt][row].long()
            queries = self.index_q[prompt][row].unflatten(0, (INDEX_HEADS, INDEX_DIM)).double()
            scores = torch.relu(queries @ index_keys[:visible].T).sum(0)
            _check_selection(scores, selected, BUDGET // RATIO)
            keys = torch.tensor(visible_keys(position, selected.tolist(), RATIO), device="cuda")
            kv = self.states[0][self.table[prompt, keys // PAGE].long(), :, keys % PAGE].float()
            q, gate = self.qkv[prompt][row, : 2 * HEADS * HEAD_DIM].float().view(HEADS, 2, HEAD_DIM).unbind(1)
            angles = rotary_angles(torch.full((3, 1), position, device="cuda"), self.inv_freq, SECTION)
            q = rotate(rms_norm(q, self.gains[0], EPS), angles).view(KV_HEADS, -1, HEAD_DIM)
            weights = (torch.einsum("kgd,nkd->kgn", q, kv[:, 0]) * HEAD_DIM**-0.5).softmax(-1)
            out = torch.einsum("kgn,nkd->kgd", weights, kv[:, 1]).flatten(0, 1)
            expected.append((out * gate.sigmoid()).flatten())
        assert rms_error(torch.stack(expected), self.out[prompt][list(rows)]) <= tolerance


def _check_selection(scores: Tensor, selected: Tensor, count: int) -> None:
    """The ``count`` best, ascending, but for the rounding of scores."""
    chosen = selected[selected >= 0]
    assert len(chosen) == min(count, len(scores)) and bool((selected[len(chosen) :] == -1).all())
    assert bool((chosen.diff() > 0).all())
    others = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    others[chosen] = False
    if bool(others.any()):
        assert float(scores[chosen].min()) >= float(scores[others].max()) * (1 - 1e-5)
