"""vLLM's Triton sparse attention over selected slots: after norm, rotation and cache write, which are not in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from kernel_timing import Timing, chained, cold
from peers.sources import use_vllm_ops

HEADS, KV_HEADS, HEAD_DIM, PAGE = 24, 2, 256, 64
SELECTED, CONTEXT, CHUNK = 2051, 32768, 8192


def measure(folder: Path) -> Iterator[Timing]:
    ops = use_vllm_ops(folder, "qsa")
    for batch, rows in ((1, 1), (1, 4), (8, 1), (32, 1), (1, CHUNK)):
        pages = CONTEXT // PAGE
        cache = torch.randn(2, batch * pages, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        tokens = batch * rows
        q, gate = torch.randn(2, tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        groups = torch.stack([torch.randperm(CONTEXT // 4, device="cuda")[:512].sort().values for _ in range(tokens)])
        slots = (4 * groups[:, :, None] + torch.arange(4, device="cuda")).flatten(1)
        tail = torch.arange(CONTEXT - 3, CONTEXT, device="cuda").expand(tokens, -1)
        count = torch.full((tokens, 1), SELECTED, device="cuda")
        indices = torch.cat([slots, tail, count], 1).int()
        owner = torch.arange(batch, device="cuda").repeat_interleave(rows).int()

        def run(
            q: torch.Tensor = q,
            cache: torch.Tensor = cache,
            indices: torch.Tensor = indices,
            table: torch.Tensor = table,
            owner: torch.Tensor = owner,
            gate: torch.Tensor = gate,
        ) -> torch.Tensor:
            return ops.qsa_sparse_paged_attention(
                q,
                cache[0],
                cache[1],
                indices,
                table,
                owner,
                use_prefill_config=q.shape[0] == CHUNK,
                output_gate=gate.flatten(1),
            )

        num_bytes = tokens * SELECTED * 2 * KV_HEADS * HEAD_DIM * 2
        name = f"vLLM qsa_sparse_paged_attention B={batch} T={rows}"
        yield chained(name, [run], num_bytes) if rows == CHUNK else cold(name, run, num_bytes)
