"""Operands of `qsa_attention` at any size and on any device, over a cache that is NaN wherever nothing may be read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from op_checks import equal_bits, rms_error
from torch import Generator, Tensor

from qwen4exp_trt.plugins.number_formats import e4m3_from_float
from qwen4exp_trt.plugins.numerics import rms_norm, rotary_angles, rotate
from qwen4exp_trt.plugins.qsa_attention.reference import visible_keys
from qwen4exp_trt.plugins.sample_batches import sample_batch

FP8 = torch.float8_e4m3fn
EPS = 1e-6
Run = Callable[[dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Attention:
    """The released model's, by default. ``ratio`` 0 is dense; ``half`` of the rotated dims."""

    heads: int = 24
    kv_heads: int = 2
    head_dim: int = 256
    half: int = 32
    section: tuple[int, int, int] = (11, 11, 10)
    budget: int = 2048
    ratio: int = 4
    page: int = 64


def attention_operands(
    attention: Attention,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    generator: Generator,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype = torch.bfloat16,
    padding_seqs: int = 0,
    padding_rows: int = 0,
) -> dict[str, Any]:
    """Random operands on the generator's device. Selections are random subsets, other ones for each row."""
    a, device = attention, generator.device
    batch = sample_batch(query_lens, context_lens, padding_seqs, padding_rows)
    tokens = batch.pop("T")
    table, cache = _paged_cache(a, batch["seq_lens"].tolist(), context_lens, generator, cache_dtype)
    frequency = torch.arange(a.half, device=device)
    positions = torch.zeros(3, tokens, dtype=torch.int32)
    for (start, count), context in zip(_spans(batch), context_lens, strict=True):
        positions[:, start : start + count] = context + torch.arange(count)
    widths = 2 * (a.heads + a.kv_heads) * a.head_dim
    qkv = torch.randn(tokens, widths, generator=generator, device=device)
    return {
        "qkv": qkv.to(dtype),
        "q_gain": 2 + torch.rand(a.head_dim, generator=generator, device=device),  # so that the softmax has peaks
        "k_gain": 1 + torch.rand(a.head_dim, generator=generator, device=device),
        "positions": positions.to(device),
        "inv_freq": 1e7 ** (-frequency.float() / a.half),
        "selected_groups": _selection(a, batch, tokens, generator).to(device),
        "kv_cache": cache,
        **{name: batch[name].to(device) for name in ("query_start_loc", "seq_lens", "num_seqs")},
        "block_table": table.to(device),
        "num_heads": a.heads,
        "mrope_section": list(a.section),
        "compress_ratio": a.ratio,
        "eps": EPS,
    }


def check_attention(operands: dict[str, Any], run: Run, tolerance: float) -> None:
    """Hold the output and the cache after ``run`` against float32; nothing else of the cache may change."""
    cache = operands["kv_cache"]
    before, expected = cache.clone(), expected_attention(operands)
    out = run(operands)
    rows = len(expected[0])
    assert rms_error(expected[0], out[:rows]) <= tolerance
    places = new_places(operands)
    stored = torch.stack([cache[page, :, row] for page, row in places]).float()
    assert rms_error(expected[1], stored) <= tolerance
    for page, row in places:
        before[page, :, row] = cache[page, :, row]
    assert equal_bits(before, cache)


def expected_attention(operands: dict[str, Any], only: Container[int] | None = None) -> tuple[Tensor, Tensor]:
    """The output of the real rows (zeros if not in ``only``) and the new tokens' keys and values ``[N, 2, HKV, D]``.

    Float32; nothing is written.
    """
    o = operands
    cache, page_size = o["kv_cache"], o["kv_cache"].shape[2]
    heads, (kv_heads, head_dim) = o["num_heads"], cache.shape[-2:]
    starts = o["query_start_loc"].tolist()
    rows = starts[int(o["num_seqs"])]
    qkv = o["qkv"][:rows].float()
    q, gate = qkv[:, : 2 * heads * head_dim].unflatten(1, (heads, 2, head_dim)).unbind(2)
    k, v = qkv[:, 2 * heads * head_dim :].unflatten(1, (2, kv_heads, head_dim)).unbind(1)
    angles = rotary_angles(o["positions"][:, :rows], o["inv_freq"], o["mrope_section"])[:, None]
    q, k = (rotate(rms_norm(x, gain, EPS), angles) for x, gain in ((q, o["q_gain"]), (k, o["k_gain"])))
    new = torch.stack([k, v], 1)
    new = e4m3_from_float(new).float() if cache.dtype == FP8 else new
    out = torch.zeros(rows, heads, head_dim, device=q.device)
    for b, (start, end) in enumerate(itertools.pairwise(starts[: int(o["num_seqs"]) + 1])):
        context = int(o["seq_lens"][b]) - (end - start)
        for row in range(start, end):
            if only is not None and row not in only:
                continue
            selected = o["selected_groups"][row].tolist() if o["compress_ratio"] else []
            keys = torch.tensor(visible_keys(context + row - start, selected, o["compress_ratio"]), device=q.device)
            pages = o["block_table"][b].long()[keys // page_size]
            kv = cache[pages, :, keys % page_size].float()
            kv[keys >= context] = new[start + keys[keys >= context] - context]
            grouped = q[row].unflatten(0, (kv_heads, -1))
            scores = torch.einsum("kgd,nkd->kgn", grouped, kv[:, 0]) * head_dim**-0.5
            out[row] = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), kv[:, 1]).flatten(0, 1)
    return (out * gate.sigmoid()).flatten(1), new


def new_places(operands: dict[str, Any]) -> list[tuple[int, int]]:
    """Page and row of the cache of each new token."""
    page_size, table = operands["kv_cache"].shape[2], operands["block_table"].tolist()
    starts, lens = operands["query_start_loc"].tolist(), operands["seq_lens"].tolist()
    return [
        (table[b][p // page_size], p % page_size)
        for b in range(int(operands["num_seqs"]))
        for p in range(lens[b] - (starts[b + 1] - starts[b]), lens[b])
    ]


def _spans(batch: dict[str, Any]) -> list[tuple[int, int]]:
    starts = batch["query_start_loc"].tolist()
    return [(starts[b], starts[b + 1] - starts[b]) for b in range(int(batch["num_seqs"]))]


def _paged_cache(
    a: Attention, lens: Sequence[int], contexts: Sequence[int], generator: Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A block table of scattered pages and the cache with the contexts in it."""
    needed = [-(-length // a.page) for length in lens]
    order = torch.randperm(sum(needed) + 2, generator=generator, device=generator.device).tolist()
    table = torch.full((len(lens), max([*needed, 1]) + 1), -1, dtype=torch.int32)
    shape = (len(order), 2, a.page, a.kv_heads, a.head_dim)
    cache = torch.randn(shape, generator=generator, device=generator.device)
    unused = torch.ones(len(order), a.page, dtype=torch.bool)
    for b, count in enumerate(needed):
        pages, order = order[:count], order[count:]
        table[b, :count] = torch.tensor(pages, dtype=torch.int32)
        for i, page in enumerate(pages):
            unused[page, : max(0, contexts[b] - i * a.page) if b < len(contexts) else 0] = False
    cache = e4m3_from_float(cache) if dtype == FP8 else cache.to(dtype)
    nan = torch.tensor(torch.nan, device=generator.device).to(dtype)
    raw = cache.view(torch.uint8) if dtype == FP8 else cache
    raw.masked_fill_(unused[:, None, :, None, None].to(cache.device), nan.view(raw.dtype) if dtype == FP8 else nan)
    return table, cache


def _selection(a: Attention, batch: dict[str, Any], tokens: int, generator: Generator) -> Tensor:
    if a.ratio == 0:
        return torch.full((1, 1), -1, dtype=torch.int32)
    selected = torch.full((tokens, a.budget // a.ratio), -1, dtype=torch.int32)
    for b, (start, count) in enumerate(_spans(batch)):
        for row in range(start, start + count):
            visible = (int(batch["seq_lens"][b]) - (start + count - row) + 1) // a.ratio
            chosen = torch.randperm(visible, generator=generator, device=generator.device)[: selected.shape[1]]
            selected[row, : len(chosen)] = chosen.sort().values.int().cpu()
    return selected
