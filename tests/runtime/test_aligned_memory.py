"""Memory of the host that an engine can be given."""

from __future__ import annotations

import pytest
import torch

from qwen4exp_trt.runtime.aligned_memory import ALIGNMENT, aligned_empty

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 5), (7, 13), (2, 3, 129)], ids=str)
def test_a_tensor_begins_at_a_multiple_and_its_storage_with_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Many at a time: one alone may lie well by chance."""
    tensors = [aligned_empty(shape, dtype) for _ in range(8)]
    for tensor in tensors:
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        if tensor.numel():
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_memory_lives_as_long_as_what_is_viewed_of_it() -> None:
    view = aligned_empty((4, 1 << 16), torch.float32).fill_(7)[2]
    others = [aligned_empty((4, 1 << 16), torch.float32).fill_(index) for index in range(8)]
    assert (view == 7).all() and len(others) == 8
