"""``qwen4exp-inspect`` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu_stream import CpuStream
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.builder.inspection.__main__ import inspect, main, parse_args
from qwen4exp_trt.builder.inspection.document import Inspection
from qwen4exp_trt.builder.inspection.page import render_page
from qwen4exp_trt.runtime.tensorrt.module import load_trt

Capture = pytest.CaptureFixture[str]


def fails(arguments: list[str], capsys: Capture) -> str:
    """The line on stderr of a command that must fail."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("qwen4exp-inspect: error: ")
    return err


def test_text_and_json(inspection: Inspection, engine_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main([str(engine_bundle), "--filter", "*.mlp.moe"]) == 0
    text = capsys.readouterr().out
    assert "layers.{0,1}.mlp.moe x2" in text and "qsa_attention" not in text
    assert main([str(engine_bundle), "--all", "--batch", "2", "--context", "9", "--prefill-context", "5"]) == 0
    text = capsys.readouterr().out
    assert "\nlayers.0.mlp.moe " in text and "2 new tokens of 2 sequences behind 9;" in text
    assert "8 new tokens of 1 sequence behind 5;" in text
    assert main([str(engine_bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == inspection.to_json()
    assert main([str(engine_bundle), "--html"]) == 0
    assert capsys.readouterr().out == f"{render_page(inspection)}\n"
    file = tmp_path / "bundle.json"
    assert main([str(engine_bundle), "--json", "-o", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(file.read_text()) == inspection.to_json() and list(tmp_path.iterdir()) == [file]


def test_differences_are_an_exit_code(engine_bundle: Path, float_bundle: Path, capsys: Capture) -> None:
    assert main([str(engine_bundle), "--diff", str(engine_bundle)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main([str(engine_bundle), "--diff", str(float_bundle)]) == 1
    assert "activation_dtype  bfloat16" in capsys.readouterr().out
    assert main([str(engine_bundle), "--diff", str(float_bundle), "--filter", "layers.1.*"]) == 1
    out = capsys.readouterr().out
    assert "layers.1.mlp.moe" in out and "layers.0" not in out


def test_errors_are_one_line(engine_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "no such folder" in fails([str(tmp_path / "nothing")], capsys)
    assert "not a bundle" in fails([str(tmp_path)], capsys)
    assert "--batch is 9" in fails([str(engine_bundle), "--batch", "9"], capsys)
    assert "no such folder" in fails([str(engine_bundle), "--diff", str(tmp_path / "nothing")], capsys)
    where = tmp_path / "no" / "file.json"
    assert "cannot write a file there" in fails([str(engine_bundle), "--json", "-o", str(where)], capsys)
    assert "--filter 'layers.7.*': no op, state or weight has such a name; one is 'embed_tokens.embedding'" in fails(
        [str(engine_bundle), "--filter", "layers.7.*"], capsys
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--json --diff x", "--diff: not allowed with argument --json"),
        ("--all --html", "--all is for the text"),
        ("--all --diff x", "--all is for the text"),
        ("--filter a --json", "--filter is for the text and --diff"),
        ("--engine --diff x", "--engine adds nothing to --diff"),
        ("--device cpu", "--device needs --engine"),
    ],
)
def test_options_that_do_nothing_together_are_refused(options: str, message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bundle", *options.split()])
    assert message in capsys.readouterr().err


@pytest.mark.trt
def test_engines_are_not_loaded_on_a_cpu(engine_bundle: Path, capsys: Capture) -> None:
    error = fails([str(engine_bundle), "--engine", "--device", "cpu"], capsys)
    assert "device 'cpu': an engine runs on a CUDA GPU; use device 'cuda' or 'cuda:N'" in error


@pytest.mark.trt
def test_engines_are_loaded_where_asked(engine_bundle: Path, capsys: Capture) -> None:
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), engine_bundle)
    args = parse_args([str(engine_bundle), "--engine", "--device", "cpu"])
    assert inspect(args, trt, lambda device: CpuStream()) == 0
    assert "layers are in the loaded engine by the same name" in capsys.readouterr().out
    args = parse_args([str(engine_bundle), "--engine", "--device", "cpu", "--json"])
    assert inspect(args, trt, lambda device: CpuStream()) == 0
    document = json.loads(capsys.readouterr().out)
    assert all(layer["inspector"] for part in document["parts"] for layer in part["engine"]["layers"])
