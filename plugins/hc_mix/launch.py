"""Launches the gated mean of the streams."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.plugins.hc_norm.launch import vector_of
from qwen4exp_trt.plugins.kernels import Call, Kernel, Launch, c_type

THREADS = 256


def launches(call: Call) -> Iterator[Launch]:
    tokens, hidden = call["mixed"].shape
    dtype, streams = call["mixed"].dtype, call.attrs["hc_count"]
    items = tokens * (hidden // vector_of(hidden, dtype))
    defines = (("HIDDEN", hidden), ("STREAMS", streams), ("ACTIVATION", c_type(dtype)))
    yield Launch(
        Kernel("hc_mix/kernel.cu", "hc_mix", defines),
        grid=(-(-items // THREADS), 1, 1),
        threads=THREADS,
        args=(call["gate_logits"], call["normed"], call["mixed"], tokens),
    )
