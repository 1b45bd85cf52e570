"""Launches of the mixtures of experts: the geometry of the kernels in ``plugins/moe``, for weights of any format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import Arg, Call, Kernel, Launch, ScratchRef, SemaphoreRef, c_type
from qwen4exp_trt.plugins.moe_many_launch import many_launches, takes_many_tokens
from qwen4exp_trt.plugins.moe_operands import BF16, NVFP4, Defines, Experts, Sizes, sizes_of

WARP = 32
MOST_ROWS = 512
"""Rows of a step that are routed together: what bounds the workspace."""
ROUTER_WARPS = 16
FEW_ROWS = 1
"""Up to so many, a warp computes one router row for them; beyond, tensor cores do."""


@dataclass(frozen=True)
class Rows:
    """Rows ``first`` up to ``first + count`` of a step, routed together, and the workspace for them."""

    first: int
    count: int
    logits: ScratchRef
    chosen: ScratchRef
    weights: ScratchRef
    order: ScratchRef
    items: ScratchRef
    num_items: ScratchRef
    hidden: ScratchRef
    outputs: ScratchRef

    @property
    def span(self) -> tuple[int, int]:
        return self.first, self.count


def moe_launches(call: Call) -> Iterator[Launch]:
    """Router, choice of experts, gate and up, down, and the weighted sum, for up to `MOST_ROWS` rows at a time."""
    sizes = sizes_of(call)
    total = call["x"].shape[0]
    if takes_many_tokens(sizes, total):
        yield from many_launches(call, sizes)
        return
    most = min(total, MOST_ROWS)
    entries = most * (sizes.choices + 1)
    scratch = {
        "logits": call.scratch(most, (sizes.experts + 4) // 4 * 4),
        "chosen": call.scratch(entries, dtype=torch.int32),
        "weights": call.scratch(entries),
        "order": call.scratch(entries, dtype=torch.int32),
        "items": call.scratch(entries, 4, dtype=torch.int32),
        "num_items": call.scratch(1, dtype=torch.int32),
        "hidden": call.scratch(entries, max(sizes.routed.inner, sizes.shared.inner), dtype=sizes.activation),
        "outputs": call.scratch(entries, sizes.hidden),
    }
    for first in range(0, total, MOST_ROWS):
        rows = Rows(first, min(MOST_ROWS, total - first), **scratch)
        yield _router(call, sizes, rows)
        if total == 1 and sizes.on_tensor_cores and sum(_one_token_warps(sizes)) <= WARP:
            yield from _one_token(call, sizes, rows)
        else:
            yield from _grouped_tokens(call, sizes, rows)


# --- router ---------------------------------------------------------------------------------------------------------


def _router(call: Call, sizes: Sizes, rows: Rows) -> Launch:
    args = (call["x"], call["router_weight"], call["shared_expert_gate"], rows.logits, *rows.span)
    defines = (*sizes.routing, ("HIDDEN", sizes.hidden))
    if rows.count > FEW_ROWS and sizes.on_tensor_cores and sizes.experts % 16 == 0:
        warps = _largest_divisor(sizes.hidden // BF16.step, ROUTER_WARPS)
        group = 32 if rows.count > 16 else 8 * -(-rows.count // 8)
        return Launch(
            Kernel(
                "moe/router_tiles.cu",
                "router_tiles",
                (*defines, ("WARPS", warps), ("GROUP", group), ("STEPS_AHEAD", 5)),
            ),
            grid=(sizes.experts // 16 + 1, -(-rows.count // group), 1),
            threads=warps * WARP,
            args=args,
        )
    item_bytes = sizes.activation.itemsize
    vectors = int(sizes.hidden * item_bytes % 16 == 0 and sizes.hidden * item_bytes <= 16 * 1024)
    activation = ("ACTIVATION", c_type(sizes.activation))
    return Launch(
        Kernel("moe/router.cu", "router_logits", (*defines, activation, ("TOKENS", 16), ("VECTORS", vectors))),
        grid=(-(-(sizes.experts + 1) // 4), -(-rows.count // 16), 1),
        threads=4 * WARP,
        args=args,
    )


# --- one token ------------------------------------------------------------------------------------------------------

ONE_ROWS, ONE_AHEAD = 8, 5


def _one_token_warps(sizes: Sizes) -> tuple[int, int]:
    """The warps of `down_one` for pairs of routed experts and for the shared one, which take about as long each."""
    routed, shared = sizes.routed, sizes.shared
    steps = shared.inner // shared.format.step
    steps_of_half = steps // 2 if steps % 2 == 0 else steps
    alike = round(steps * routed.format.step / (2 * routed.inner))
    return -(-sizes.choices // 2), _largest_divisor(steps_of_half, max(alike, 1))


def _one_token(call: Call, sizes: Sizes, rows: Rows) -> Iterator[Launch]:
    yield _gate_up(call, sizes, rows, group=8, shared_groups=1, routed_groups=sizes.choices, one_token=1)
    routed_warps, shared_warps = _one_token_warps(sizes)
    defines = (
        *sizes.groups,
        *(("GROUP", 8), ("SHARED_WARPS", shared_warps)),
        *(("ROUTED_TILES", 1), ("SHARED_TILES", 1), ("ROUTED_AHEAD", ONE_AHEAD), ("SHARED_AHEAD", ONE_AHEAD)),
    )
    yield Launch(
        Kernel("moe/down_one.cu", "down_one", defines),
        grid=(sizes.hidden // ONE_ROWS, 1, 1),
        threads=(routed_warps + shared_warps) * WARP,
        args=(
            *sizes.routed.args("down"),
            *sizes.shared.args("down"),
            rows.logits,
            rows.chosen,
            rows.weights,
            rows.hidden,
            call["out"],
        ),
    )


# --- groups of tokens -----------------------------------------------------------------------------------------------


def _group_size(sizes: Sizes, count: int) -> int:
    """Tokens that share a read of an expert: 8, or more where most experts have more."""
    if not sizes.on_tensor_cores:
        return 8
    of_expert = count * sizes.choices / sizes.experts
    return 8 if of_expert <= 3 else 16


def _grouped_tokens(call: Call, sizes: Sizes, rows: Rows) -> Iterator[Launch]:
    group, entries = _group_size(sizes, rows.count), rows.count * sizes.choices
    shared_groups, distinct = -(-rows.count // group), min(sizes.experts, entries)
    routed_groups = distinct if rows.count <= group else (entries + distinct * (group - 1)) // group
    batch = (call["query_start_loc"], call["num_seqs"])
    warps = 8
    yield Launch(
        Kernel("moe/route.cu", "route", (*sizes.routing, ("NORMALIZED", sizes.normalized), ("GROUP", group))),
        grid=(-(-rows.count // warps), 1, 1),
        threads=warps * WARP,
        args=(
            *(rows.logits, rows.chosen, rows.weights, rows.order, rows.items, rows.num_items, SemaphoreRef()),
            *batch,
            *rows.span,
        ),
        shared_bytes=8 * warps * sizes.experts,
    )
    if sizes.on_tensor_cores:
        yield _gate_up(call, sizes, rows, group, shared_groups, routed_groups, one_token=0)
        yield _down(call, sizes, rows, group, shared_groups, routed_groups)
    else:
        yield from _any_size(call, sizes, rows, group, shared_groups, routed_groups)
    yield Launch(
        Kernel(
            "moe/combine.cu",
            "combine",
            (*sizes.routing, ("HIDDEN", sizes.hidden), ("ACTIVATION", c_type(sizes.activation))),
        ),
        grid=(-(-sizes.hidden // 256), rows.count, 1),
        threads=256,
        args=(rows.outputs, rows.weights, rows.logits, *batch, call["out"], *rows.span),
    )


@dataclass(frozen=True)
class Shape:
    """Warps of a block; tiles of a warp; 16-byte loads of a lane on their way; blocks that an SM has room for."""

    warps: int
    tiles: int
    loads: int
    blocks: int

    def tiles_of(self, experts: Experts) -> int:
        """A row of 16 bits is long enough for one tile."""
        return 1 if experts.format == BF16 else self.tiles

    def defines(self, sizes: Sizes) -> Defines:
        """Two formats in one kernel take more registers: it gives up a block of an SM for them."""
        tiles, shared_tiles = self.tiles_of(sizes.routed), self.tiles_of(sizes.shared)
        return (
            *(("ROUTED_TILES", tiles), ("ROUTED_AHEAD", max(1, self.loads // (2 * tiles)))),
            *(("SHARED_TILES", shared_tiles), ("SHARED_AHEAD", max(1, self.loads // (2 * shared_tiles)))),
            ("MIN_BLOCKS", self.blocks - (sizes.routed.format != sizes.shared.format)),
        )


GATE_UP_ONE = Shape(warps=5, tiles=1, loads=4, blocks=7)
"""For one token of NVFP4 experts: small blocks, of which each multiprocessor of an H200 has about as many, at once."""
GATE_UP_FEW, FEW_TOKENS = Shape(warps=5, tiles=2, loads=8, blocks=4), 4
"""For up to `FEW_TOKENS`, where blocks are few; as the others, the fastest of those measured on an H200."""
GATE_UP, DOWN = Shape(warps=2, tiles=2, loads=8, blocks=7), Shape(warps=4, tiles=1, loads=10, blocks=4)
GATE_UP_16, DOWN_16 = Shape(warps=5, tiles=2, loads=8, blocks=2), Shape(warps=4, tiles=2, loads=8, blocks=3)
"""For groups of more than 8 tokens."""


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)


def _gate_up(
    call: Call, sizes: Sizes, rows: Rows, group: int, shared_groups: int, routed_groups: int, one_token: int
) -> Launch:
    routed, shared = sizes.routed, sizes.shared
    few = GATE_UP_FEW if rows.count <= FEW_TOKENS else GATE_UP
    if one_token and routed.format == shared.format == NVFP4:
        few = GATE_UP_ONE
    shape = few if group == 8 else GATE_UP_16
    tiles, shared_tiles = shape.tiles_of(routed), shape.tiles_of(shared)
    shared_blocks = shared_groups * (shared.inner // (8 * shared_tiles))
    steps = math.gcd(sizes.hidden // routed.format.step, sizes.hidden // shared.format.step)
    warps = _largest_divisor(steps, shape.warps)
    defines = (
        *sizes.groups,
        *shape.defines(sizes),
        *(("GROUP", group), ("WARPS", warps), ("ONE_TOKEN", one_token), ("NORMALIZED", sizes.normalized)),
    )
    return Launch(
        Kernel("moe/gate_up.cu", "gate_up", defines),
        grid=(shared_blocks + routed_groups * (routed.inner // (8 * tiles)), 1, 1),
        threads=warps * WARP,
        args=(
            call["x"],
            *routed.args("gate_up"),
            *shared.args("gate_up"),
            *(rows.logits, rows.chosen, rows.weights, rows.order, rows.items, rows.num_items),
            *(call["query_start_loc"], call["num_seqs"]),
            rows.hidden,
            *rows.span,
            shared_blocks,
        ),
        shared_bytes=4 * warps * 16 * max(tiles, shared_tiles) * group,
    )


def _down(call: Call, sizes: Sizes, rows: Rows, group: int, shared_groups: int, routed_groups: int) -> Launch:
    shape = DOWN if group == 8 else DOWN_16
    tiles, shared_tiles = shape.tiles_of(sizes.routed), shape.tiles_of(sizes.shared)
    shared_blocks = shared_groups * (sizes.hidden // (16 * shared_tiles * shape.warps))
    defines = (*sizes.groups, *shape.defines(sizes), ("GROUP", group), ("WARPS", shape.warps))
    return Launch(
        Kernel("moe/down.cu", "down", defines),
        grid=(shared_blocks + routed_groups * (sizes.hidden // (16 * tiles * shape.warps)), 1, 1),
        threads=shape.warps * WARP,
        args=(
            *sizes.routed.args("down"),
            *sizes.shared.args("down"),
            *(rows.hidden, rows.order, rows.items, rows.num_items, call["query_start_loc"], call["num_seqs"]),
            rows.outputs,
            *rows.span,
            shared_blocks,
        ),
    )


def _any_size(
    call: Call, sizes: Sizes, rows: Rows, group: int, shared_groups: int, routed_groups: int
) -> Iterator[Launch]:
    """`_gate_up` and `_down` without tensor cores, an output element a thread."""
    threads = 64
    defines = (
        *sizes.groups,
        *(("GROUP", group), ("ACTIVATION", c_type(sizes.activation))),
        *(("ROUTED_TILES", 1), ("ROUTED_AHEAD", 1), ("SHARED_TILES", 1), ("SHARED_AHEAD", 1)),
    )
    lists = (rows.order, rows.items, rows.num_items, call["query_start_loc"], call["num_seqs"])

    def launch(entry: str, routed_rows: int, shared_rows: int, args: tuple[Arg, ...]) -> Launch:
        shared_blocks = shared_groups * -(-shared_rows // threads)
        return Launch(
            Kernel("moe/any_size.cu", entry, defines),
            grid=(shared_blocks + routed_groups * -(-routed_rows // threads), 1, 1),
            threads=threads,
            args=(*args, *rows.span, shared_blocks),
        )

    gate_up = (*sizes.routed.args("gate_up"), *sizes.shared.args("gate_up"))
    yield launch("gate_up_any", sizes.routed.inner, sizes.shared.inner, (call["x"], *gate_up, *lists, rows.hidden))
    down = (*sizes.routed.args("down"), *sizes.shared.args("down"), rows.hidden, *lists, rows.outputs)
    yield launch("down_any", sizes.hidden, sizes.hidden, down)
