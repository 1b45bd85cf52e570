from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qwen4exp_trt.runtime.prefix_cache.packed_rows import RowLayout
from qwen4exp_trt.runtime.specs import NUM_SLOTS, StateKind, StateSpec
from qwen4exp_trt.runtime.weights import dtype_from_name

ROWS = 3
SHAPES = {
    "odd": ((3,), "bfloat16"),
    "ids": ((5,), "int32"),
    "cache": ((2, 4, 8), "float8_e4m3fn"),
    "s": ((1,), "float32"),
}
SPECS = [
    StateSpec(name, StateKind.CONV_STATE, 0, (NUM_SLOTS, *shape), dtype) for name, (shape, dtype) in SHAPES.items()
]


def random_states(device: str = "cpu") -> dict[str, Tensor]:
    """Any bits; NaNs among them have to survive as well."""
    states = {}
    for spec in SPECS:
        raw = torch.randint(0, 256, (ROWS * spec.row_bytes,), dtype=torch.uint8)
        states[spec.name] = raw.view(dtype_from_name(spec.dtype)).view(ROWS, *SHAPES[spec.name][0]).to(device)
    return states


def bits(tensor: Tensor) -> list[int]:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).tolist()


def check_round_trip(states: dict[str, Tensor], host_only: str | None = None) -> None:
    if host_only is not None:
        states[host_only] = states[host_only].cpu()
    layout = RowLayout(SPECS, states)
    before = {name: bits(state[1]) for name, state in states.items()}
    others = {name: bits(state[[0, 2]].clone()) for name, state in states.items()}
    packed = layout.read(1)
    assert packed.num_bytes == layout.num_bytes == sum(spec.row_bytes for spec in SPECS)
    for state in states.values():
        state[1].flatten().view(torch.uint8).fill_(7)
    assert {name: bits(row) for name, row in layout.rows(packed).items()} == before
    assert {name: row.dtype for name, row in layout.rows(packed).items()} == {n: s.dtype for n, s in states.items()}
    on_host = layout.on_host(packed)
    copy = layout.empty()
    for source, target in zip(on_host.payload(), copy.payload(), strict=True):
        target[:] = source
    layout.write(1, copy)
    assert {name: bits(state[1]) for name, state in states.items()} == before
    assert {name: bits(state[[0, 2]].clone()) for name, state in states.items()} == others, "the other rows stay"


def test_a_row_of_any_bits_goes_to_the_host_and_back() -> None:
    check_round_trip(random_states())


@pytest.mark.gpu
@pytest.mark.parametrize("host_only", [None, "ids"])
def test_a_row_of_a_gpu(host_only: str | None) -> None:
    check_round_trip(random_states("cuda"), host_only)


def test_rows_of_whole_vectors_come_first() -> None:
    layout = RowLayout(SPECS, random_states())
    assert layout.describe() == [
        ["cache", "float8_e4m3fn", [2, 4, 8]],
        ["odd", "bfloat16", [3]],
        ["ids", "int32", [5]],
        ["s", "float32", [1]],
    ]


def test_no_states_are_an_empty_row() -> None:
    layout = RowLayout([], {})
    packed = layout.read(0)
    layout.write(0, packed)
    assert (packed.num_bytes, layout.rows(packed), layout.on_host(packed)) == (0, {}, packed)
