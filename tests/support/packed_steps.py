"""Steps of three sequences, made by hand: decoding, several rows a sequence, sequences that join."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAGES = 3
"""Pages of each sequence."""


def packed_step(starts: Sequence[int], ends: Sequence[int]) -> dict[str, Tensor]:
    """Tokens ``starts[b]`` to ``ends[b]`` of each sequence b; all rows give logits. The last slot is the first's."""
    ranges = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    positions = [position for tokens in ranges for position in tokens]
    ids = [7 * seq + 3 * position + 5 for seq, tokens in enumerate(ranges) for position in tokens]
    inputs = {
        "input_ids": ids,
        "positions": [positions] * 3,
        "query_start_loc": torch.tensor([0, *map(len, ranges)]).cumsum(0).tolist(),
        "seq_lens": list(ends),
        "slot_ids": [2 - seq for seq in range(len(ends))],
        "block_table": [[PAGES * (2 - seq) + page for page in range(PAGES)] for seq in range(len(ends))],
        "num_seqs": [len(ends)],
        "logits_indices": list(range(len(ids))),
    }
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in inputs.items()}


STEPS = [
    packed_step((0, 0), (5, 8)),
    packed_step((5, 8), (6, 9)),
    packed_step((6, 9, 0), (10, 10, 1)),
    packed_step((10, 10, 1), (12, 12, 3)),
    packed_step((12, 12, 3), (20, 15, 11)),
]
"""No sequence has more rows in a step than one that is captured may have."""
