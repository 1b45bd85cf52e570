"""The table from the ``q4e`` ops that are no plugins to what TensorRT's parser reads."""

from __future__ import annotations

import torch
from torch import fx

from qwen4exp_trt.builder.aten_ops import Lowering, Site
from qwen4exp_trt.builder.onnx_graph import ONNX_DTYPES, TRT_DOMAIN
from qwen4exp_trt.plugins.number_formats import NVFP4_BLOCK


def _nvfp4_w4a4_linear(
    site: Site, x: fx.Node, weight: fx.Node, block_scales: fx.Node, alpha: fx.Node, input_scale: float
) -> None:
    """The form of which TensorRT makes one GEMM that reads FP4 and FP8 and writes float32, and one kernel behind it.

    Block scales are dequantized with the constant 1: a scale that is a network input would make TensorRT write out the
    whole weight in float32. The second-level scales are in ``alpha`` instead.
    """
    scale = site.operand("input_scale", input_scale, torch.float32)
    codes, scales = site.emit_parts(
        "quantize",
        ("x_codes", "x_block_scales"),
        "TRT_FP4DynamicQuantize",
        x,
        scale,
        domain=TRT_DOMAIN,
        axis=-1,
        block_size=NVFP4_BLOCK,
        scale_type=ONNX_DTYPES[torch.float8_e4m3fn],
    )
    one = site.operand("one", 1.0, torch.float32)
    values = [_dequantize(site, "x", codes, scales, one), _dequantize(site, "w", weight, block_scales, one)]
    product = site.emit_part("product", "Gemm", *values, transB=1)
    if site.dtype == torch.float32:
        site.emit("Mul", product, alpha)
    else:
        site.emit("Cast", site.emit_part("scaled", "Mul", product, alpha), to=ONNX_DTYPES[site.dtype])


def _dequantize(site: Site, name: str, codes: fx.Node | str, block_scales: fx.Node | str, one: fx.Node | str) -> str:
    """Float32 code * block scale, ``[..., K]``."""
    scales = site.emit_part(f"{name}_scales", "DequantizeLinear", block_scales, one)
    return site.emit_part(f"{name}_values", "DequantizeLinear", codes, scales, axis=-1, block_size=NVFP4_BLOCK)


NATIVE_TO_ONNX: dict[str, Lowering] = {"nvfp4_w4a4_linear": _nvfp4_w4a4_linear}
"""Op -> its lowering: one for each op whose spec says ``is_native``."""
