from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch

from qwen4exp_trt.runtime.calibration import Calibration


def test_json_keeps_every_digit() -> None:
    scale = torch.tensor(0.1 / 2688).item()
    calibration = Calibration({"layers.0.out_proj": scale}, "text.txt", "ab" * 32, 4096)
    assert Calibration.from_json(json.loads(json.dumps(asdict(calibration)))) == calibration


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1, "1.0"])
def test_scales_must_be_positive_floats(scale: Any) -> None:
    data = {"scales": {"layers.0": scale}, "text": "text.txt", "sha256": "", "num_tokens": 2}
    with pytest.raises(ValueError, match=r"input scale .* of layers\.0"):
        Calibration.from_json(data)
