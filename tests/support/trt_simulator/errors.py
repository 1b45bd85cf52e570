"""What the simulator says of a wrong use of TensorRT."""

from __future__ import annotations

from cpu_stream import violations


class SimulatorError(Exception):
    """A use of TensorRT's runtime that would be refused, or silently wrong, or of which nothing is promised.

    No code of the package catches it as such. Where a caller turns any exception into an answer (a server, a dropped
    request), `violations` still has it, and the tests that run on the simulator look there.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        violations.append(message)


class NotInApiError(AttributeError):
    """A member that TensorRT's bindings do not have; an AttributeError, so that ``hasattr`` works."""
