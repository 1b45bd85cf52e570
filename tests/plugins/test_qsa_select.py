"""Paths of the selection's kernels that the sample cases do not reach, through the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from qsa_batches import exact_selection, normals, quarters, select_operands
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Plan
from qwen4exp_trt.plugins.qsa_select import SPEC, launch

SMALL: dict[str, Any] = {"heads": 4, "dim": 16, "page": 16, "ratio": 2, "budget": 40}


def check(args: list[Any]) -> None:
    expected = exact_selection(args)
    for reverse in (False, True):
        (selected,) = run_emulated(SPEC, args, reverse=reverse)
        assert torch.equal(selected[: len(expected)], expected)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def levels(*shares: float, seed: int = 0) -> Any:
    """Keys of zeros, but for a share of each higher level."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        draws = torch.rand((*shape[:-1], 1), generator=generator)
        return torch.stack([draws < share for share in shares]).sum(0).to(torch.bfloat16).expand(shape).contiguous()

    return make


def test_candidates_are_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    """More groups than shared memory holds."""
    monkeypatch.setattr(launch, "SELECT_THREADS", (128, 128))
    make = quarters(torch.bfloat16)
    check(select_operands([1, 2], [4301, 4202], make, make, **SMALL))


@pytest.mark.parametrize("shares", [(0.0,), (0.004,), (0.4,), (1.0,), (0.5, 0.004), (0.9, 0.5, 0.002)])
def test_ties_go_to_the_lower_group(monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...]) -> None:
    """Fewer positive scores than are selected, or so many equal ones that not all can be candidates."""
    monkeypatch.setattr(launch, "SELECT_THREADS", (128, 128))
    check(select_operands([1, 1], [6601, 600], levels(*shares), ones, **SMALL))


def test_scores_of_any_size_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Denormal, huge and infinite scores; negative zeros and NaN count as zero."""
    monkeypatch.setattr(launch, "SELECT_THREADS", (128, 128))
    args = select_operands([1], [4400], normals(torch.bfloat16), ones, **({**SMALL, "heads": 1}))
    keys = args[1].view(-1, 16)
    keys[:] = keys.float().mul(torch.exp2(torch.arange(len(keys)).remainder(240) - 120.0)[:, None]).bfloat16()
    keys[7], keys[9, 0], keys[11] = -0.0, torch.inf, 1e-40
    check(args)
    keys[8] = torch.nan
    (selected,) = run_emulated(SPEC, args)
    keys[8] = 0
    assert torch.equal(selected, exact_selection(args))


@pytest.mark.parametrize("heads,dim,page", [(1, 8, 4), (2, 40, 3), (3, 32, 16), (8, 64, 32)])
def test_odd_shapes(heads: int, dim: int, page: int) -> None:
    make = quarters(torch.bfloat16)
    shape: dict[str, Any] = {"heads": heads, "dim": dim, "page": page, "ratio": 4, "budget": 24}
    check(select_operands([1, 0, 8, 2], [203, 40, 138, 27], make, make, padding=2, **shape))


@pytest.mark.parametrize("heads,dim,page", [pytest.param(1, 48, 4, marks=pytest.mark.slow), (4, 128, 16)])
def test_tiles_of_rows(monkeypatch: pytest.MonkeyPatch, heads: int, dim: int, page: int) -> None:
    """Several tiles of a sequence, some of them in two turns, beside a sequence of one row."""
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 110_000)
    make = quarters(torch.bfloat16)
    shape: dict[str, Any] = {"heads": heads, "dim": dim, "page": page, "ratio": 4, "budget": 24}
    check(select_operands([1, 75], [203, 500], make, make, padding=1, **shape))


def test_rows_beyond_the_workspace_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 40_000)
    make = quarters(torch.bfloat16)
    check(select_operands([2, 41, 1], [90, 41, 300], make, make, **SMALL))


def test_workspace_never_shrinks_with_the_shapes() -> None:
    def scratch(tokens: int, max_blocks: int) -> int:
        shapes = {"index_q": [tokens, 512], "index_k_cache": [9, 16, 128], "query_start_loc": [2], "seq_lens": [1]}
        shapes |= {"block_table": [1, max_blocks], "num_seqs": [1]}
        dtypes = {arg.name: torch.bfloat16 if arg.dtype == "activation" else torch.int32 for arg in SPEC.inputs}
        return SPEC.plan(shapes, dtypes, {"budget": 2048, "compress_ratio": 4}, 48).scratch_bytes

    sizes = [scratch(tokens, 4096) for tokens in (1, 8, 64, 480, 481, 482, 512, 8192)]
    assert sizes == sorted(sizes) and sizes[-1] == launch.SCRATCH_BYTES
    sizes = [scratch(512, blocks) for blocks in (1, 32, 33, 512, 3000, 3001, 4096)]
    assert sizes == sorted(sizes)


def test_a_step_of_padding_alone() -> None:
    args = select_operands([], [], ones, ones, padding=3, max_blocks=70, **SMALL)
    run_emulated(SPEC, args)


def test_impossible_heads_are_refused() -> None:
    args = select_operands([1], [90], ones, ones, **({**SMALL, "heads": 9}))
    with pytest.raises(PluginError, match="9 index heads of D=16"):
        run_emulated(SPEC, args)


def test_the_workspace_of_a_chunk_of_the_longest_prompt_is_bounded() -> None:
    def plan(tokens: int, pages: int) -> Plan:
        shapes = [[tokens, 512], [pages, 16, 128], [2], [1], [1, pages], [1]]
        dtypes = [torch.bfloat16] * 2 + [torch.int32] * 4
        names = [arg.name for arg in SPEC.inputs]
        attrs = {"budget": 2048, "compress_ratio": 4}
        return SPEC.plan(dict(zip(names, shapes, strict=True)), dict(zip(names, dtypes, strict=True)), attrs, 48)

    assert plan(8192, 4096).scratch_bytes == launch.SCRATCH_BYTES
    assert plan(8192, 512).scratch_bytes == launch.SCRATCH_BYTES >= plan(100, 4096).scratch_bytes
    assert len(plan(8192, 512).launches) == 2 * 3, "three turns of 3,855 rows and fewer"
