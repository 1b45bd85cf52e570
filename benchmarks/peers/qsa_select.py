"""vLLM's Triton scoring of compressed keys. Its top-k is compiled C++ that its sources do not hold: torch's instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_timing import Timing, chained, cold
from peers.sources import use_vllm_ops

HEADS, DIM, PAGE, RATIO, TOP_GROUPS = 4, 128, 16, 4, 512
CHUNK = 8192


def measure(folder: Path) -> Iterator[Timing]:
    ops = use_vllm_ops(folder, "qsa_indexer")

    def topk(logits: torch.Tensor, visible: Any, budget: Any, ratio: Any, out: torch.Tensor, workspace: Any) -> None:
        out.copy_(logits.topk(TOP_GROUPS, sorted=False).indices)

    ops._topk = topk
    for context, batch in ((32768, 1), (262144, 1), (262144, 8)):
        groups = context // RATIO
        pages = groups // PAGE
        keys = torch.randn(batch * pages, PAGE, 1, DIM, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        visible = torch.full((batch,), groups, device="cuda", dtype=torch.int32)
        out = torch.empty(batch, TOP_GROUPS, device="cuda", dtype=torch.int32)

        def run(
            q: torch.Tensor = q,
            keys: torch.Tensor = keys,
            table: torch.Tensor = table,
            visible: torch.Tensor = visible,
            out: torch.Tensor = out,
        ) -> None:
            ops.qsa_select_paged_decode(q, keys, table, visible, 2048, RATIO, 1, out)

        yield cold(f"vLLM scores + torch top-k, {context} tokens B={batch}", run, batch * groups * DIM * 2)
    ops._topk = lambda *_: None
    for context in (32768, 131072):
        groups = context // RATIO
        keys = torch.randn(groups // PAGE, PAGE, 1, DIM, device="cuda", dtype=torch.bfloat16)
        args = (
            torch.randn(CHUNK, HEADS, DIM, device="cuda", dtype=torch.bfloat16),
            keys,
            torch.randperm(groups // PAGE, device="cuda").int().view(1, -1),
            torch.tensor([0, CHUNK], device="cuda", dtype=torch.int32),
            torch.arange(context - CHUNK + 1, context + 1, device="cuda", dtype=torch.int32) // RATIO,
            *(TOP_GROUPS * RATIO, RATIO, CHUNK),
            torch.empty(CHUNK, TOP_GROUPS, device="cuda", dtype=torch.int32),
            context,
        )
        name = f"vLLM scores of a chunk without top-k, {context} tokens T={CHUNK}"
        yield chained(name, [lambda args=args: ops.qsa_select_paged_prefill(*args)], keys.nbytes)
