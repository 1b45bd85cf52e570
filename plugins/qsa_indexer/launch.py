"""Launches the indexer: a warp for each head of each token and for each sequence."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch, c_type

WARPS = 4
"""Tasks of a block, as in kernel.cu."""


def launches(call: Call) -> Iterator[Launch]:
    """Operands and output in the order of the spec, T, B, MB, eps."""
    dims, attrs = call.dims, call.attrs
    tokens, batch_size, ratio, section = dims["T"], dims["B"], attrs["compress_ratio"], attrs["mrope_section"]
    heads, remainder = divmod(dims["N"], dims["D"])
    if remainder or heads < 2 or not 0 < 2 * dims["R"] <= dims["D"] or dims["RS"] < ratio:
        raise PluginError(
            f"q4e::qsa_indexer: N={dims['N']}, D={dims['D']}, R={dims['R']}, RS={dims['RS']}; expected N a multiple of "
            f"D (query heads | key), at least one rotated pair and 2 R <= D, RS >= compress_ratio={ratio}"
        )
    defines = (
        ("ACTIVATION", c_type(call["index_qk"].dtype)),
        ("HEADS", heads - 1),
        ("DIM", dims["D"]),
        ("HALF", dims["R"]),
        ("RATIO", ratio),
        ("PAGE", dims["G"]),
        ("RING", dims["RS"]),
        ("MROPE_HEIGHT", 3 * section[1]),
        ("MROPE_WIDTH", 3 * section[2]),
    )
    yield Launch(
        Kernel("qsa_indexer/kernel.cu", "qsa_indexer", defines),
        grid=(-(-(batch_size + tokens * heads) // WARPS), 1, 1),
        threads=32 * WARPS,
        args=(*call.tensors.values(), tokens, batch_size, dims["MB"], F32(attrs["eps"])),
    )
