"""A stream of a GPU, whose own queue keeps the order."""

from __future__ import annotations

from typing import Any

import torch


class CudaTarget:
    """A CUDA stream that somebody else made. What is enqueued can be captured in a CUDA graph."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self._stream = torch.cuda.ExternalStream(handle, device=device)

    @property
    def is_capturing(self) -> bool:
        with torch.cuda.stream(self._stream):
            return torch.cuda.is_current_stream_capturing()

    def enqueue(self, work: Any) -> None:
        with torch.cuda.stream(self._stream):
            work.poison()
            work.run()
