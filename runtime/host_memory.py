"""Memory of the host that a GPU reads where it is."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError


def map_into_gpu(tensor: Tensor, name: str) -> Tensor:
    """Pin the memory of ``tensor`` and map it into the GPUs' addresses, at its own address, for as long as it lives.

    Torch's own pinned memory comes in powers of two: a table of 48 GiB would take 64. `BundleError` naming the weight
    ``name`` if the memory cannot be pinned.
    """
    runtime: Any = torch.cuda.cudart()
    address, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    if size:
        status = runtime.cudaHostRegister(address, size, 0)
        if int(status) != 0:
            raise BundleError(
                f"cannot pin {size / 2**30:,.1f} GiB of the host's memory for the weight {name}: "
                f"{runtime.cudaGetErrorString(status)}; raise the limit of locked memory (ulimit -l), or build with "
                "--ple-residency disk"
            )
        weakref.finalize(tensor, runtime.cudaHostUnregister, address)
    return tensor
