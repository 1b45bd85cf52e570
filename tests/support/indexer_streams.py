"""Sequences that grow by random steps through ``qsa_indexer``, with rows taken back, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.plugins.packed import PackedBatch
from qwen4exp_trt.plugins.qsa_indexer import SPEC
from qwen4exp_trt.plugins.sample_batches import gain

Run = Callable[[list[Any]], Tensor]


class Streams:
    """``count`` sequences of up to ``length`` tokens: what the model would feed them, and their states.

    A state beyond the accepted tokens holds what rejected rows left behind.
    """

    def __init__(
        self,
        count: int,
        length: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        heads: int = 4,
        dim: int = 128,
        half: int = 32,
        section: Sequence[int] = (11, 11, 10),
        page: int = 16,
        ratio: int = 4,
    ) -> None:
        generator = torch.Generator().manual_seed(count * length)
        blocks = -(-length // (page * ratio))
        self.rows = torch.randn(count, length, (heads + 1) * dim, generator=generator).to(device, dtype)
        self.positions = (
            torch.arange(length, dtype=torch.int32) + torch.randint(3, (3, length), generator=generator).int()
        )
        self.positions = self.positions.to(device)
        self.gains = gain(generator, dim).to(device), gain(generator, dim).to(device)
        self.inv_freq = (1e7 ** -(torch.arange(half) / half)).to(device)
        self.section, self.ratio, self.device = list(section), ratio, device
        self.table = torch.randperm(count * blocks, generator=generator).int().view(count, blocks).to(device)
        self.slots = torch.randperm(count, generator=generator).int().to(device)
        self.states = [
            torch.full((count * blocks, page, dim), torch.nan, dtype=dtype, device=device),
            torch.full((count, ratio + 7, dim), torch.nan, dtype=dtype, device=device),
            torch.full((count, ratio + 7, 3), -(2**30), dtype=torch.int32, device=device),
        ]

    def operands(self, context_lens: Sequence[int], query_lens: Sequence[int], states: list[Tensor]) -> list[Any]:
        """Of a step that adds ``query_lens`` tokens to ``context_lens``, which are in ``states``."""
        spans = [slice(context, context + new) for context, new in zip(context_lens, query_lens, strict=True)]
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        lens = torch.tensor([span.stop for span in spans], dtype=torch.int32)
        return [
            torch.cat([self.rows[b, span] for b, span in enumerate(spans)]),
            *self.gains,
            torch.cat([self.positions[:, span] for span in spans], 1),
            self.inv_freq,
            *states,
            *(starts.to(self.device), lens.to(self.device), self.slots, self.table),
            torch.tensor([len(spans)], dtype=torch.int32, device=self.device),
            *(self.section, self.ratio, 1e-6),
        ]

    def grow(self, run: Run, steps: int, most_rows: int, generator: torch.Generator) -> tuple[list[int], Tensor]:
        """Run ``steps`` of 0 to ``most_rows`` tokens a sequence, of which a random part is taken back (at most 8).

        Returns the accepted lengths and the queries of the last step.
        """
        lens = [0] * len(self.slots)
        queries = torch.empty(0)
        for _ in range(steps):
            new = torch.randint(most_rows + 1, (len(lens),), generator=generator).tolist()
            new = [min(count, self.rows.shape[1] - length) for count, length in zip(new, lens, strict=True)]
            if not any(new):
                continue
            queries = run(self.operands(lens, new, self.states))
            taken_back = [int(torch.randint(min(count, 8) + 1, (1,), generator=generator)) for count in new]
            lens = [length + count - back for length, count, back in zip(lens, new, taken_back, strict=True)]
        return lens, queries

    def error(self, lens: Sequence[int]) -> float:
        """Relative RMS error of the keys of complete groups and of the open group's ring rows, against the CPU body.

        The ring's positions must be equal.
        """
        args = self.operands([0] * len(lens), lens, [torch.zeros_like(state) for state in self.states])
        args = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in args]
        args = [arg.float() if isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 else arg for arg in args]
        SPEC.body(*args)
        batch = PackedBatch.from_metadata(len(args[0]), args[8], args[9], args[12])
        keys, ring, positions = (state.cpu() for state in self.states)
        pairs = []
        for b, length in enumerate(batch.query_lens.tolist()):
            pages, groups = self.table[b].cpu().long(), length // self.ratio
            slot, open_rows = int(self.slots[b]), torch.arange(groups * self.ratio, length) % ring.shape[1]
            pairs.append((args[5][pages].flatten(0, 1)[:groups], keys[pages].flatten(0, 1)[:groups].float()))
            pairs.append((args[6][slot, open_rows], ring[slot, open_rows].float()))
            assert torch.equal(args[7][slot, open_rows], positions[slot, open_rows])
        expected, got = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        assert torch.isfinite(got).all()
        return float((expected - got).norm() / expected.norm())
