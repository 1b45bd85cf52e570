"""Launches the grouped RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch, c_type

THREADS = 256


def launches(call: Call) -> Iterator[Launch]:
    tokens, streams = call.dims["T"], call.attrs["hc_count"]
    defines = (("HIDDEN", call.dims["W"] // streams), ("ACTIVATION", c_type(call["stack"].dtype)))
    yield Launch(
        Kernel("hc_norm/kernel.cu", "hc_norm", defines),
        grid=(streams, tokens, 1),
        threads=THREADS,
        args=(call["stack"], call["gain"], call["normed"], F32(call.attrs["eps"])),
    )
