from __future__ import annotations

import builtins
import socket
import sys
from typing import Any

import pytest

from qwen4exp_trt.runtime.serve import server
from qwen4exp_trt.runtime.serve.__main__ import API_KEY_VARIABLE, main, parse_args


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends with."""
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("qwen4exp-serve: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "bundle"),
        (("--port", "70000"), "--port is 70000"),
        (("--port", "http"), "--port"),
        (("--max-waiting", "-1"), "--max-waiting is -1; at least 0"),
        (("--max-body-size", "0"), "--max-body-size is 0; at least 1"),
        (("--drain-timeout", "nan"), "--drain-timeout is nan"),
        (("--api-key", ""), "--api-key"),
        (("--api-key", "schlüssel"), "--api-key"),
        (("--host", "0.0.0.0"), "lets other machines in; give an API key"),
        (("--host", "::"), "lets other machines in; give an API key"),
        (("--host", "example.org"), "lets other machines in; give an API key"),
        (("--host", "127.0.0.1", "--port", "0"), "nothing-here"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    bundle = ("nothing-here",) if arguments else ()
    assert message in refusal(capsys, *bundle, *arguments)


def test_the_default_address_is_loopback() -> None:
    args = parse_args(["bundle"])
    with server.bound_socket(args.host, 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
        assert server.url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_the_key_comes_from_the_environment_or_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_args(["bundle"]).api_key is None
    monkeypatch.setenv(API_KEY_VARIABLE, "one")
    assert parse_args(["bundle"]).api_key == "one"
    assert parse_args(["bundle", "--api-key", "two"]).api_key == "two"


def test_the_help_does_not_show_the_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "a-secret")
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    assert "a-secret" not in capsys.readouterr().out


def test_a_port_that_is_taken_is_told_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in refusal(
            capsys, "nothing-here", "--port", port
        )


def test_without_the_extra_the_command_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_module = builtins.__import__

    def import_without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "fastapi" or "fastapi" in name.split("."):
            raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")
        return import_module(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("qwen4exp_trt.runtime.serve.a")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("qwen4exp_trt.runtime.serve.app", raising=False)
    monkeypatch.setattr(builtins, "__import__", import_without)
    assert "fastapi is not installed: pip install 'qwen4exp-trt[serve]'" in refusal(capsys, "nothing-here")
