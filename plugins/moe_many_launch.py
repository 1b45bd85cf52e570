"""Launches of the mixtures of experts for many tokens: grouped products of tiles of tokens, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from qwen4exp_trt.plugins.kernels import MAX_SHARED_BYTES, Arg, Call, Kernel, Launch, ScratchRef, SemaphoreRef
from qwen4exp_trt.plugins.moe_operands import BF16, FP8_BLOCKS, NVFP4, Defines, ExpertFormat, Sizes

WARP = 32
STAGES_BYTES = MAX_SHARED_BYTES - 7 * 1024
"""Shared memory for stages; the rest is for what a block works on."""
MANY_TOKENS = 512
"""Rows of a step from which these kernels are the faster ones, as measured on an H200."""
MOST_ROWS, MOST_PAIRS = 8192, 128 << 10
"""Rows of a step that are routed together, and pairs of a row and an expert: they bound the workspace."""
ROUTE_WARPS, ROUTE_TOKENS = 16, 32


@dataclass(frozen=True)
class Shape:
    """Tiles of 8 tokens of a block; its warps; tiles of 16 rows of a warp; most stages of K; blocks of an SM."""

    token_tiles: int
    warps: int
    row_tiles: int
    stages: int
    blocks: int
    tiles_apart: int = 1
    """A tile of fewer tokens saves the work of whole multiples of so many token tiles."""

    @property
    def tokens(self) -> int:
        return 8 * self.token_tiles

    @property
    def part_rows(self) -> int:
        """Rows of a weight for which the warps have room at once."""
        return 16 * self.row_tiles * self.warps

    def defines(self, routed: ExpertFormat, shared: ExpertFormat) -> Defines:
        return (
            *(("TOKEN_TILES", self.token_tiles), ("WARPS", self.warps)),
            *(("ROUTED_ROW_TILES", self.row_tiles_of(routed)), ("SHARED_ROW_TILES", self.row_tiles_of(shared))),
            *(("ROUTED_STAGES", self.stages_of(routed)), ("SHARED_STAGES", self.stages_of(shared))),
            *(("MIN_BLOCKS", self.blocks), ("TILES_APART", self.tiles_apart)),
        )

    def shared_bytes(self, *formats: ExpertFormat) -> int:
        return max(self.stages_of(form) * self._stage_bytes(form, self.row_tiles_of(form)) for form in formats)

    def row_tiles_of(self, form: ExpertFormat) -> int:
        """Fewer where three stages would not fit: weights of 16 bits by many warps."""
        fewer = (self.row_tiles, self.row_tiles // 2, 1)
        return next(tiles for tiles in fewer if 3 * self._stage_bytes(form, tiles) <= STAGES_BYTES)

    def stages_of(self, form: ExpertFormat) -> int:
        return min(self.stages, STAGES_BYTES // self._stage_bytes(form, self.row_tiles_of(form)))

    def _stage_bytes(self, form: ExpertFormat, row_tiles: int) -> int:
        elements, tile_bytes = {NVFP4: (64, 576), FP8_BLOCKS: (128, 2048), BF16: (64, 2048)}[form]
        return 2 * elements * self.tokens + self.warps * row_tiles * tile_bytes


PREPARE_WARPS, COMBINE_THREADS = 4, 128
ROUTER = Shape(token_tiles=8, warps=4, row_tiles=2, stages=3, blocks=2)
PARTS_OF_BLOCK = 1
"""Parts of rows of a tile that a block takes on an average, if there were as many tiles as there can be."""
MOST_OUTPUT_BYTES = 256 << 20
"""Of workspace for the outputs of experts: `down` and the sum take as many elements of the hidden vector at a time."""


def takes_many_tokens(sizes: Sizes, rows: int) -> bool:
    """Whether a step of so many rows is for these kernels."""
    whole = sizes.on_tensor_cores and sizes.experts % 16 == 0
    return rows >= MANY_TOKENS and whole and all(experts.inner % 64 == 0 for experts in (sizes.routed, sizes.shared))


def _shape(sizes: Sizes, rows: int) -> Shape:
    """Tiles that few experts have more tokens than, so that most weights are decoded once; measured on an H200.

    Two formats in one kernel take more registers.
    """
    of_expert, formats = rows * sizes.choices / sizes.experts, {sizes.routed.format, sizes.shared.format}
    wide = sizes.hidden % 256 == 0 and all(experts.inner % 128 == 0 for experts in (sizes.routed, sizes.shared))
    if FP8_BLOCKS in formats:
        return Shape(token_tiles=6 if of_expert > 24 else 4, warps=4, row_tiles=2, stages=3, blocks=2)
    if of_expert <= 24:
        return Shape(token_tiles=3 if of_expert <= 12 else 4, warps=8 if wide else 4, row_tiles=2, stages=4, blocks=2)
    most = 12 if len(formats) == 1 else 10
    return Shape(token_tiles=8 if of_expert <= 48 else most, warps=4, row_tiles=2, stages=4, blocks=2)


@dataclass(frozen=True)
class Turn:
    """Rows ``first`` up to ``first + count`` of a step, routed together, and the workspace for them."""

    first: int
    count: int
    logits: ScratchRef
    arranged: ScratchRef
    chosen: ScratchRef
    weights: ScratchRef
    counts: ScratchRef
    firsts: ScratchRef
    positions: ScratchRef
    tokens: ScratchRef
    tiles: ScratchRef
    num_tiles: ScratchRef
    hidden: ScratchRef
    outputs: ScratchRef

    @property
    def span(self) -> tuple[int, int]:
        return self.first, self.count


def many_launches(call: Call, sizes: Sizes) -> Iterator[Launch]:
    """Router, choice of experts, tiles by expert, gate and up, down, and the weighted sum, in turns of `MOST_ROWS`."""
    total = call["x"].shape[0]
    most = min(total, MOST_ROWS, MOST_PAIRS // (sizes.choices + 1))
    pairs, blocks = most * sizes.choices, -(-most // ROUTE_TOKENS)
    i32 = torch.int32
    scratch = {
        "logits": call.scratch(most, (sizes.experts + 4) // 4 * 4),
        "arranged": call.scratch(most if _arranged(sizes) != BF16 else 0, sizes.hidden, dtype=torch.bfloat16),
        "chosen": call.scratch(pairs, dtype=i32),
        "weights": call.scratch(pairs),
        "counts": call.scratch(sizes.experts, _count_pitch(most), dtype=torch.uint8),
        "firsts": call.scratch(blocks, sizes.experts, dtype=i32),
        "positions": call.scratch(pairs, dtype=i32),
        "tokens": call.scratch(pairs, dtype=i32),
        "tiles": call.scratch(pairs, 4, dtype=i32),
        "num_tiles": call.scratch(1, dtype=i32),
        "hidden": call.scratch(pairs + most, max(sizes.routed.inner, sizes.shared.inner), dtype=torch.bfloat16),
        "outputs": call.scratch(min((pairs + most) * sizes.hidden, MOST_OUTPUT_BYTES // 4)),
    }
    for first in range(0, total, most):
        turn = Turn(first, min(most, total - first), **scratch)
        yield from _route(call, sizes, turn)
        yield from _experts(call, sizes, turn)


def _arranged(sizes: Sizes) -> ExpertFormat:
    """The format for which x is arranged; `BF16` if none wants it. Only one of them ever stands beside BF16."""
    return sizes.routed.format if sizes.routed.format != BF16 else sizes.shared.format


def _count_pitch(rows: int) -> int:
    """Bytes for an expert's counts in all blocks of `many_route`, which are read 16 at a time."""
    return -(-rows // (16 * ROUTE_TOKENS)) * 16


def _route(call: Call, sizes: Sizes, turn: Turn) -> Iterator[Launch]:
    batch, hidden = (call["query_start_loc"], call["num_seqs"]), ("HIDDEN", sizes.hidden)
    arranged = (("WARPS", PREPARE_WARPS), ("ARRANGED", _arranged(sizes).name))
    yield Launch(
        Kernel("moe/many_prepare.cu", "many_prepare", (*sizes.routing, hidden, *arranged)),
        grid=(-(-turn.count // PREPARE_WARPS), 1, 1),
        threads=PREPARE_WARPS * WARP,
        args=(call["x"], call["shared_expert_gate"], turn.logits, turn.arranged, *turn.span),
    )
    router = replace(ROUTER, row_tiles=ROUTER.row_tiles if sizes.experts % 32 == 0 else 1)
    yield Launch(
        Kernel("moe/many_router.cu", "many_router", (*sizes.routing, hidden, *router.defines(BF16, BF16))),
        grid=(-(-sizes.experts // (16 * router.row_tiles * router.warps)) * -(-turn.count // router.tokens), 1, 1),
        threads=router.warps * WARP,
        args=(call["x"], call["router_weight"], turn.logits, *turn.span),
        shared_bytes=router.shared_bytes(BF16),
    )
    shape = _shape(sizes, turn.count)
    defines = (*sizes.routing, ("NORMALIZED", sizes.normalized), ("TILE_TOKENS", shape.tokens))
    grid = (-(-turn.count // ROUTE_TOKENS), 1, 1)
    yield Launch(
        Kernel("moe/many_route.cu", "many_route", defines),
        grid=grid,
        threads=ROUTE_WARPS * WARP,
        args=(
            *(turn.logits, turn.chosen, turn.weights, turn.counts, turn.firsts, turn.tiles, turn.num_tiles),
            *(SemaphoreRef(), *batch, *turn.span, _count_pitch(turn.count)),
        ),
        shared_bytes=ROUTE_WARPS * 8 * sizes.experts,
    )
    yield Launch(
        Kernel("moe/many_route.cu", "many_place", defines),
        grid=grid,
        threads=ROUTE_WARPS * WARP,
        args=(turn.chosen, turn.firsts, turn.tokens, turn.positions, *batch, *turn.span),
    )


def _experts(call: Call, sizes: Sizes, turn: Turn) -> Iterator[Launch]:
    shape, formats = _shape(sizes, turn.count), (sizes.routed.format, sizes.shared.format)
    pairs = turn.count * sizes.choices
    defines = (*sizes.groups, *shape.defines(*formats))
    batch = (call["query_start_loc"], call["num_seqs"])
    lists = (turn.tiles, turn.num_tiles, *batch)

    tiles = min(pairs, sizes.experts) + (pairs + turn.count) // shape.tokens + 1

    def launch(name: str, rows: int, args: tuple[Arg, ...]) -> Launch:
        return Launch(
            Kernel(f"moe/{name}.cu", name, defines),
            grid=(-(-tiles * rows // (shape.part_rows * PARTS_OF_BLOCK)), 1, 1),
            threads=shape.warps * WARP,
            args=(*args, *turn.span),
            shared_bytes=shape.shared_bytes(*formats),
        )

    weights = (*sizes.routed.args("gate_up"), *sizes.shared.args("gate_up"))
    yield launch(
        "many_gate_up", 2 * sizes.routed.inner, (call["x"], turn.arranged, *weights, turn.tokens, *lists, turn.hidden)
    )
    most = MOST_OUTPUT_BYTES // (4 * shape.part_rows * (pairs + turn.count))
    outputs = shape.part_rows * _largest_divisor(sizes.hidden // shape.part_rows, most)
    weights = (*sizes.routed.args("down"), *sizes.shared.args("down"))
    for first in range(0, sizes.hidden, outputs):
        yield launch("many_down", outputs, (*weights, turn.hidden, *lists, turn.outputs, first, outputs))
        yield Launch(
            Kernel("moe/many_combine.cu", "many_combine", (*sizes.routing, ("HIDDEN", sizes.hidden))),
            grid=(-(-outputs // (4 * COMBINE_THREADS)), turn.count, 1),
            threads=COMBINE_THREADS,
            args=(
                *(turn.outputs, turn.weights, turn.positions, turn.logits, *batch, call["out"]),
                *(first, outputs, *turn.span),
            ),
        )


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
