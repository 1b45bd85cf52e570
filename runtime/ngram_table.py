"""The n-gram table as the runtime sees it, wherever it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from qwen4exp_trt.runtime.specs import PleResidency
from qwen4exp_trt.runtime.state_pool import StatePool


@dataclass(frozen=True)
class TokenWindow:
    """Tokens ``start`` to ``stop`` of a sequence, which a later step will run."""

    token_ids: Sequence[int]
    start: int
    stop: int


class NgramTable(Protocol):
    """Gives the rows of the table that the tokens of a step name."""

    @property
    def residency(self) -> PleResidency:
        """Where the table is."""
        ...

    @property
    def states(self) -> StatePool:
        """What it keeps of each sequence on the host."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """Where it is, and what was measured of its disk."""
        ...

    def complete(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs of a step (on the CPU) with what they lack. `UnreadableRowsError` leaves all as it was."""
        ...

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        """Say which tokens will come after the next step that is completed, or in it if nothing runs before it and the
        reading can begin ``at_once``."""
        ...

    def close(self) -> None:
        """Let go of files and threads."""
        ...


class ResidentTable:
    """A table in memory, the GPU's or the host's: a weight of the program, whose own ops gather the rows."""

    def __init__(self, residency: PleResidency = PleResidency.DEVICE) -> None:
        self.residency, self.states = residency, StatePool((), {})

    @property
    def info(self) -> Mapping[str, Any]:
        return {"residency": str(self.residency)}

    def complete(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return inputs

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        """It is all here."""

    def close(self) -> None:
        """It goes with the weights."""
