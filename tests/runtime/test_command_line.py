from __future__ import annotations

import argparse
import io
import os

import pytest

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.command_line import OneLineParser, byte_count, run_command

Capture = pytest.CaptureFixture[str]


def raise_(error: BaseException) -> None:
    raise error


def test_success_prints_nothing(capsys: Capture) -> None:
    assert run_command("prog", lambda: None) == 0
    assert run_command("prog", lambda: 7) == 7
    assert capsys.readouterr() == ("", "")


def test_an_error_is_one_line_whatever_its_message_has(capsys: Capture) -> None:
    assert run_command("prog", lambda: raise_(BuildError("first:\n  second\nthird"))) == 2
    assert capsys.readouterr() == ("", "prog: error: first: second third\n")


def test_a_character_that_the_output_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, encoding="ascii", write_through=True))
    assert run_command("prog", lambda: print("a é 🙂 \udcff b")) == 0
    assert output.getvalue() == b"a ? ? ? b\n"


def test_interrupt(capsys: Capture) -> None:
    assert run_command("prog", lambda: raise_(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "prog: interrupted\n")


def test_a_reader_that_went_away_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert run_command("prog", lambda: print("little, which waits in a buffer")) == 0
    assert capsys.readouterr().err == ""


def test_an_output_without_room(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert run_command("prog", lambda: print("text")) == 2
    assert capsys.readouterr().err == "prog: error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), FileNotFoundError(2, "no such file")], ids=str)
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_command("prog", lambda: raise_(error))


def test_bad_arguments_are_one_line(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        OneLineParser(prog="prog").parse_args(["extra"])
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "prog: error: unrecognized arguments: extra; see prog --help\n")


def test_sizes() -> None:
    assert [byte_count(text) for text in ("65536", "1.5KiB", " 2 MiB", "4GiB", "1TiB")] == [
        65536,
        1536,
        2 * 2**20,
        4 * 2**30,
        2**40,
    ]
    for text in ("", "GiB", "-1", "4GB", "4 gib", "1e3", "0x10"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size; write bytes, or a number with KiB"):
            byte_count(text)
