from __future__ import annotations

from pathlib import Path

import pytest

from qwen4exp_trt.errors import BundleError, CheckpointError, RequestError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime.chat_template import ChatTemplate
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.generation_config import GenerationConfig
from qwen4exp_trt.runtime.json_files import check_file_target, read_json_object, write_json, write_text
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.program_text import load_program

READERS = {
    "config.json": ModelConfig.from_dir,
    "model.safetensors.index.json": Checkpoint.open,
    "tokenizer_config.json": ChatTemplate.from_dir,
    "generation_config.json": GenerationConfig.from_dir,
    "manifest.json": Manifest.load,
    "tables.json": load_program,
}
NOT_OBJECTS = {
    b"": "not a JSON file: ",
    b"{": "not a JSON file: ",
    b"\xff\xfe": "not a JSON file: ",
    b"[" * 200_000: "not a JSON file: maximum recursion depth exceeded",
    b'{"a":' * 200_000: "not a JSON file: maximum recursion depth exceeded",
    b"9" * 5000: "not a JSON file: ",
    b"[]": "holds a list; a JSON object was expected",
    b"null": "holds a NoneType; a JSON object was expected",
    b'"text"': "holds a str; a JSON object was expected",
}


def test_an_object_is_returned(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"é": [1, null]}', encoding="utf-8")
    assert read_json_object(tmp_path / "a.json", BundleError) == {"é": [1, None]}


@pytest.mark.parametrize(("content", "message"), NOT_OBJECTS.items(), ids=lambda value: repr(value)[:20])
def test_anything_else_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json_object(path, CheckpointError)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"absent: cannot be read: No such file or directory$"):
        read_json_object(tmp_path / "absent", BundleError)
    with pytest.raises(BundleError, match=r"cannot be read: Is a directory$"):
        read_json_object(tmp_path, BundleError)


@pytest.mark.parametrize("name", READERS)
def test_every_reader_names_its_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(Exception, match=f"{name}: not a JSON file: maximum recursion depth") as caught:
        READERS[name](tmp_path)
    assert type(caught.value).__module__ == "qwen4exp_trt.errors"


def test_what_is_no_character_is_written_as_a_mark(tmp_path: Path) -> None:
    write_text(tmp_path / "page.html", "a \udcff é")
    assert (tmp_path / "page.html").read_bytes() == "a ? é".encode()


def test_a_file_is_written_where_links_lead(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target.name)
    check_file_target(link, "--json")
    write_json(link, [1])
    assert link.is_symlink() and target.read_text() == "[\n 1\n]\n"
    itself = tmp_path / "itself.json"
    itself.symlink_to(itself.name)
    check_file_target(itself, "--json")
    write_json(itself, 2)
    assert itself.read_text() == "2\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["itself.json", "link.json", "target.json"]


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("absent/target.json")
    (tmp_path / "folder.json").symlink_to(".")
    for path, message in (
        (tmp_path / "link.json", "link.json: --json cannot write a file there: No such file or directory"),
        (tmp_path / "folder.json", "--json writes a file, and this is something else"),
        (Path("/dev/full"), "--json writes a file, and this is something else"),
        (tmp_path / ("n" * 300), "--json cannot write a file there: File name too long"),
    ):
        with pytest.raises(RequestError, match=message):
            check_file_target(path, "--json")
