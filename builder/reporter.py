"""What a build tells while it runs."""

from __future__ import annotations

from qwen4exp_trt.builder.plan import Plan
from qwen4exp_trt.builder.weight_table import WeightTableRow


class Reporter:
    """Says nothing; the command prints."""

    def stage(self, name: str) -> None:
        """A step begins."""

    def show_plan(self, plan: Plan, weights: list[WeightTableRow]) -> None:
        """What the bundle will need, and what becomes of the weights, before the costly steps."""

    def show_conversion(self, folder: str, num_files: int, num_there: int, num_bytes: int, free_bytes: int) -> None:
        """Of the files of converted weights in ``folder``, how many there are already, and what the others take."""

    def progress(self, done: int, total: int) -> None:
        """How far the step is, in bytes, elements or tokens."""
