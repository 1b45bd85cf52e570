from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.generation_config import GENERATION_CONFIG_FILE, GenerationConfig
from qwen4exp_trt.runtime.sampling_params import SamplingParams


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / GENERATION_CONFIG_FILE).write_text(text)
    return folder


def test_without_the_file(tmp_path: Path) -> None:
    assert GenerationConfig.from_dir(tmp_path) == GenerationConfig(SamplingParams(), ())


CASES = {
    "released": (
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": [7, 9]},
        GenerationConfig(SamplingParams(temperature=0.7, top_k=20, top_p=0.8), (7, 9)),
    ),
    "every key": (
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
        GenerationConfig(SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1)),
    ),
    "null is absent": ({"do_sample": True, "top_k": None}, GenerationConfig(SamplingParams())),
    "one eos": ({"eos_token_id": 7}, GenerationConfig(SamplingParams(temperature=0), (7,))),
    "greedy ignores filters but not penalties": (
        {"do_sample": False, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1},
        GenerationConfig(SamplingParams(temperature=0, repetition_penalty=1.1)),
    ),
    "greedy unless told": ({"temperature": 0.7}, GenerationConfig(SamplingParams(temperature=0))),
}


@pytest.mark.parametrize(("content", "expected"), CASES.values(), ids=CASES)
def test_content(tmp_path: Path, content: dict[str, Any], expected: GenerationConfig) -> None:
    assert GenerationConfig.from_dir(write(tmp_path, content)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON file"),
        ([], "holds a list; a JSON object was expected"),
        (None, "holds a NoneType; a JSON object was expected"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; an id or a list of ids was expected"),
        ({"eos_token_id": [3, -1]}, "eos_token_id is [3, -1]"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"do_sample": True, "top_p": 0}, "SamplingParams.top_p is 0; it must be"),
        ({"repetition_penalty": "1"}, "SamplingParams.repetition_penalty is '1'; it must be"),
    ],
)
def test_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(BundleError) as caught:
        GenerationConfig.from_dir(write(tmp_path, content))
    assert message in str(caught.value)
    assert GENERATION_CONFIG_FILE in str(caught.value)
