from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from refusals import refusal
from safetensors.torch import save_file

from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.__main__ import main, parse_args
from qwen4exp_trt.runtime.manifest import FORMAT_VERSION, MANIFEST_FILE

Capture = pytest.CaptureFixture[str]
GREEDY = ["--temperature", "0", "--max-tokens", "5"]


def refused(capsys: Capture, *argv: Any) -> str:
    return refusal(capsys, "qwen4exp-generate", main, *argv)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = bundle / MANIFEST_FILE
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


# --- text ------------------------------------------------------------------------------------------------------------


def test_prints_the_text_and_nothing_else(tiny_bundle: Path, tiny_llm: LLM, capsys: Capture) -> None:
    assert main([str(tiny_bundle), "the quick", *GREEDY]) == 0
    expected = tiny_llm.generate("the quick", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text
    assert capsys.readouterr() == (expected + "\n", "")


def test_chat_wraps_the_prompt(tiny_bundle: Path, tiny_llm: LLM, capsys: Capture) -> None:
    flags = ["--chat", "--system", "Be brief.", "--no-thinking"]
    assert main([str(tiny_bundle), "Hi", *flags, *GREEDY]) == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (result,) = tiny_llm.chat(messages, SamplingParams(temperature=0, max_tokens=5), enable_thinking=False)
    assert capsys.readouterr().out == result.outputs[0].text + "\n"


def test_flags_replace_the_defaults_of_the_checkpoint(tiny_bundle: Path, tiny_llm: LLM, capsys: Capture) -> None:
    flags = [
        "--seed",
        "3",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--presence-penalty",
        "1",
        "--stop",
        "e",
        "--stop",
        "t",
    ]
    assert main([str(tiny_bundle), "the quick", "--repetition-penalty", "1.2", "--max-tokens", "20", *flags]) == 0
    params = SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=1,
        seed=3,
        stop=["e", "t"],
        max_tokens=20,
    )
    assert capsys.readouterr().out == tiny_llm.generate("the quick", params)[0].outputs[0].text + "\n"


def test_help_names_every_flag_and_default(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in ("--backend", "--device", "--checkpoint", "--max-tokens", "--seed", "--stop", "--top-k", "--chat"):
        assert flag in text
    for default in (
        "(default: eager)",
        "(default: cpu, and cuda for an engine)",
        "(default: 128)",
        "generation_config.json",
    ):
        assert default in text


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; give at least one token"),
        (
            "the " * 64,
            "the prompt has 65 tokens, but this bundle takes at most 63 (max_seq_len 64); shorten it or build",
        ),
        ("\udc80", "the text has the lone surrogate U+DC80 at position 0"),
    ],
    ids=["empty", "too long", "not Unicode"],
)
def test_prompt(tiny_bundle: Path, capsys: Capture, prompt: str, message: str) -> None:
    assert message in refused(capsys, tiny_bundle, prompt)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "SamplingParams.temperature is -1.0; it must be a number from 0 (greedy)"),
        (["--temperature", "nan"], "SamplingParams.temperature is nan"),
        (["--max-tokens", "0"], "SamplingParams.max_tokens is 0; it must be"),
        (["--stop", ""], "SamplingParams.stop is ['']; it must be"),
        (["--device", "cuda:99"], "device 'cuda:99': "),
        (["--device", "nonsense"], "device 'nonsense' cannot execute in this version; use 'cpu', 'cuda' or 'cuda:N'"),
        (["--device", "meta"], "device 'meta' cannot execute in this version"),
        (["--backend", "nonsense"], "argument --backend: invalid choice: 'nonsense'"),
        (["--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'; see qwen4exp-generate --help"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--no-thinking"], "--system and --no-thinking need --chat"),
        (["--system", "Be brief."], "--system and --no-thinking need --chat"),
        (["--checkpoint", "nowhere"], "nowhere: no such folder; give the one that holds the *.safetensors files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags(tiny_bundle: Path, capsys: Capture, flags: list[str], message: str) -> None:
    assert message in refused(capsys, tiny_bundle, "the", *flags)


def test_missing_arguments(capsys: Capture) -> None:
    assert "the following arguments are required: bundle, prompt" in refused(capsys)


def test_no_bundle(tmp_path: Path, capsys: Capture) -> None:
    assert "absent: no such folder; give a bundle that qwen4exp-build made" in refused(capsys, tmp_path / "absent", "a")
    assert f"not a bundle, it has no {MANIFEST_FILE}; make one" in refused(capsys, tmp_path, "a")
    assert f"not a bundle, it has no {MANIFEST_FILE}" in refused(capsys, bundles.DEMO_CHECKPOINT, "a")


def test_bundle_of_another_version(bundle: Path, capsys: Capture) -> None:
    edit_manifest(bundle, lambda data: data.update(package_version="0.0.1"))
    assert f"made by qwen4exp-trt 0.0.1 (bundle format {FORMAT_VERSION}), this is" in refused(capsys, bundle, "a")
    edit_manifest(bundle, lambda data: data.update(format_version=7))
    assert "(bundle format 7)" in refused(capsys, bundle, "a")


def test_bundle_of_another_op_version(bundle: Path, capsys: Capture) -> None:
    edit_manifest(bundle, lambda data: data["plugins"].update(moe=99))
    assert "its ops moe (version 99, here 1) have other versions here; build the bundle again" in refused(
        capsys, bundle, "a"
    )


@pytest.mark.parametrize("name", ["decoder.onnx", "program/graph.py", "program/tables.json", "tokenizer.json"])
def test_missing_changed_and_truncated_files(bundle: Path, capsys: Capture, name: str) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-1])
    assert f"damaged bundle: {name} was changed after the build; build it again" in refused(capsys, bundle, "a")
    (bundle / name).write_bytes(content[:-1] + b"!")
    assert f"{name} was changed" in refused(capsys, bundle, "a")
    (bundle / name).unlink()
    assert f"damaged bundle: {name} is missing; build it again" in refused(capsys, bundle, "a")


@pytest.mark.parametrize(("text", "found"), [("{", "not a JSON file"), ("[]", "holds a list"), ("{}", "damaged")])
def test_damaged_manifest(bundle: Path, capsys: Capture, text: str, found: str) -> None:
    (bundle / MANIFEST_FILE).write_text(text)
    assert f"{MANIFEST_FILE}: {found}" in refused(capsys, bundle, "a")


def test_config_only_bundle(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(bundles.config_dict()))
    bundles.build(config, tmp_path / "bundle", config_only=True)
    assert "built with --config-only, so it has no weights" in refused(capsys, tmp_path / "bundle", "a")


def test_moved_checkpoint(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    found: list[str] = []
    edit_manifest(bundle, lambda data: found.append(data["checkpoint"]["path"]))
    moved = shutil.copytree(found[0], tmp_path / "moved")
    edit_manifest(bundle, lambda data: data["checkpoint"].update(path=str(tmp_path / "gone")))
    message = refused(capsys, bundle, "a")
    assert f"no longer at {tmp_path / 'gone'}; say where it is now with --checkpoint" in message
    assert main([str(bundle), "the", *GREEDY, "--checkpoint", str(moved)]) == 0
    assert len(capsys.readouterr().out) > 1


def test_other_checkpoint(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    message = refused(capsys, tiny_bundle, "a", "--checkpoint", tmp_path)
    assert "is not the checkpoint that was expected: model.safetensors has" in message
    assert "give that checkpoint, or build the bundle again from this one" in message


def test_truncated_checkpoint(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    found: list[str] = []
    edit_manifest(bundle, lambda data: found.append(data["checkpoint"]["path"]))
    copy = shutil.copytree(found[0], tmp_path / "copy")
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert "model.safetensors: truncated or damaged" in refused(capsys, bundle, "a", "--checkpoint", copy)


def test_an_error_in_the_middle_of_the_text(
    tiny_bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, steps = LLM.stream, 3

    def fail_after_some_steps(llm: LLM, *args: Any) -> Any:
        for chunk, _ in zip(original(llm, *args), range(steps), strict=False):
            yield chunk
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", fail_after_some_steps)
    assert main([str(tiny_bundle), "the", *GREEDY]) == 130
    assert capsys.readouterr().err == "qwen4exp-generate: interrupted\n"


def test_bundle_works_wherever_it_is_and_from_any_folder(
    bundle: Path, tiny_llm: LLM, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", "the quick", *GREEDY]) == 0
    expected = tiny_llm.generate("the quick", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text
    assert capsys.readouterr() == (expected + "\n", "")


def test_a_pipe_whose_reader_is_gone_is_no_error(tiny_bundle: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "qwen4exp_trt.runtime", str(tiny_bundle), "the quick", *GREEDY]
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
