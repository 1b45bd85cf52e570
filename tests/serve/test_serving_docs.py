"""docs/serving.md and OpenAI's client agree with the server on the fields. Its examples run in test_live_server.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import openai
import pytest

from qwen4exp_trt.runtime.serve.__main__ import parse_args
from qwen4exp_trt.runtime.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest

DOCS = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
FIELDS = DOCS.partition("\n## Fields\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_every_field_is_documented(model: type[GenerationRequest]) -> None:
    listed = set(re.findall(r"`(\w+)`", FIELDS))
    assert set(model.model_fields) - listed == set()


@pytest.mark.parametrize(
    ("method", "model"),
    [
        (openai.resources.Completions.create, CompletionRequest),
        (openai.resources.chat.Completions.create, ChatRequest),
    ],
)
def test_every_field_of_the_openai_client_is_known(method: object, model: type[GenerationRequest]) -> None:
    of_the_call = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert set(inspect.signature(method).parameters) - of_the_call - set(model.model_fields) == set()


def test_every_flag_is_documented_or_an_option_of_llm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    server = capsys.readouterr().out.partition("\nserver:\n")[2].partition("\n\n")[0]
    flags = re.findall(r"^  (--[\w-]+)", server, re.MULTILINE)
    assert len(flags) == 7 and all(f"`{flag}`" in DOCS for flag in flags)
