"""The projections that stay in BF16: this project's kernel beside cuBLAS, alone and chained over a stack of layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Timing, Work, chained, cold
from torch import Tensor

from qwen4exp_trt.plugins.cuda_body import semaphores
from qwen4exp_trt.plugins.execute import execute, num_multiprocessors
from qwen4exp_trt.plugins.kernels import Call, Plan, TensorRef, make_plan
from qwen4exp_trt.plugins.linear_launch import BF16, Tokens, Weight, product_launches

SHAPES = {"b and a": (96, 2560), "index_qk": (640, 2560), "n-gram key": (10240, 2560), "n-gram value": (2560, 2560)}
LARGE = {"qkvz": (16384, 2560), "out": (2560, 6144)}
LAYERS = 24


def plan(rows: int, columns: int, tokens: int) -> Plan:
    shapes = {"x": (tokens, columns), "weight": (rows, columns), "out": (tokens, rows)}
    tensors = {name: TensorRef(name, shape, torch.bfloat16) for name, shape in shapes.items()}
    x, weight = Tokens(tensors["x"], torch.bfloat16, tokens), Weight(BF16, tensors["weight"])
    return make_plan(
        lambda call: product_launches(call, x, weight, tensors["out"]), Call(tensors, {}, {}, num_multiprocessors(0))
    )


def own_product(weight: Tensor, x: Tensor) -> Work:
    kernels = plan(*weight.shape, len(x))

    def work() -> Tensor:
        out = x.new_empty(len(x), len(weight))
        scratch = torch.empty(kernels.scratch_bytes, dtype=torch.uint8, device="cuda")
        pointers = {"x": x.data_ptr(), "weight": weight.data_ptr(), "out": out.data_ptr()}
        stream = torch.cuda.current_stream().cuda_stream
        execute(kernels, pointers, scratch.data_ptr(), semaphores(0).data_ptr(), 0, stream)
        return out

    return work


def measure() -> Iterator[Timing]:
    for name, (rows, columns) in (SHAPES | LARGE).items():
        weights = torch.randn(LAYERS, rows, columns, dtype=torch.bfloat16, device="cuda").unbind()
        for tokens in (1, 8):
            x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
            own = [own_product(weight, x) for weight in weights]
            peer: list[Work] = [lambda x=x, weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]
            error = (own[0]().float() - x.float() @ weights[0].float().T).norm() / (
                x.float() @ weights[0].float().T
            ).norm()
            assert error < 3e-3, error
            num_bytes = 2 * (rows * columns + tokens * (rows + columns))
            for who, works in (("own", own), ("cuBLAS", peer)):
                title = f"bf16_linear {name} {rows}x{columns} T={tokens} {who}"
                yield cold(title, works[0], num_bytes)
                yield chained(f"{title}, {LAYERS} chained", works, num_bytes)
