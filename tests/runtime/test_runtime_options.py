from __future__ import annotations

import argparse
import inspect

import pytest

from qwen4exp_trt.runtime import LLM, __main__, evaluate_command
from qwen4exp_trt.runtime.bench import __main__ as bench_command
from qwen4exp_trt.runtime.runtime_options import RUNTIME_OPTIONS, add_runtime_options, llm_options


def parsed(*argv: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_runtime_options(parser)
    return llm_options(parser.parse_args(argv))


def test_every_option_is_one_of_llm_and_every_option_of_llm_is_one() -> None:
    keywords = [
        name for name in inspect.signature(LLM).parameters if name not in ("bundle", "progress", "weight_maker")
    ]
    assert sorted(option.name for option in RUNTIME_OPTIONS) == sorted(keywords)


def test_only_what_is_given_is_passed_on() -> None:
    assert parsed() == {}
    given = parsed("--device", "cuda:1", "--num-blocks", "7", "--max-num-seqs", "2")
    assert given == {"device": "cuda:1", "num_blocks": 7, "max_num_seqs": 2}


@pytest.mark.parametrize("command", [__main__, evaluate_command, bench_command])
def test_every_command_has_every_option(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse_args(["--help"])  # pyright: ignore[reportAttributeAccessIssue]
    text = capsys.readouterr().out
    assert [option.flag for option in RUNTIME_OPTIONS if option.flag not in text] == []


def test_choices_are_told_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--cuda-graphs", "some")
    assert "invalid choice: 'some' (choose from" in (error := capsys.readouterr().err)
    assert "CudaGraphs" not in error and "tensorrt" in error
