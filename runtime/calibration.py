"""What a calibration found, as the manifest keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Calibration:
    """The scales of quantized activations, and the text on which the model was run to find them."""

    scales: dict[str, float]
    """Path of a projection -> its ``input_scale``: amax of its input / (6 * 448), a float32 number."""
    text: str
    """The name of the text's file."""
    sha256: str
    """Of that file."""
    num_tokens: int
    """How many of the text's first tokens were run."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """What ``dataclasses.asdict`` made. ValueError for a scale that is not positive and finite."""
        calibration = cls(**data)
        for path, scale in calibration.scales.items():
            if type(scale) is not float or not 0 < scale < math.inf:
                raise ValueError(f"input scale {scale!r} of {path}")
        return calibration
