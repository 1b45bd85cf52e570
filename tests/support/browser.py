"""A headless Chromium that opens pages, clicks, types and reads the DOM, by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO_INSTALL = "no browser; install one with: apt-get install --no-install-recommends chromium"
_READ_FD, _WRITE_FD = 3, 4
"""Where Chromium expects its ends of ``--remote-debugging-pipe``."""
_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
]
_KEY_CODES = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """One process; skips the test, and says how to install one, where there is no browser."""
    executable = find_browser()
    if executable is None:
        pytest.skip(HOW_TO_INSTALL)
    to_browser, from_browser = os.pipe(), os.pipe()
    # Out of the way of the two numbers that the child needs.
    ends = [os.dup2(fd, 100 + i) for i, fd in enumerate((to_browser[0], from_browser[1]))]

    def connect() -> None:
        os.dup2(ends[0], _READ_FD)
        os.dup2(ends[1], _WRITE_FD)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=connect, close_fds=False
        )
        for fd in (to_browser[0], from_browser[1], *ends):
            os.close(fd)
        browser = Browser(to_browser[1], from_browser[0])
        try:
            yield browser
        finally:
            browser.close()
            process.wait(timeout=30)


class Browser:
    """The connection. Messages are JSON with a zero byte behind each."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._unread, self._last_id = b"", 0
        self.pages: dict[str, Page] = {}

    def call(self, method: str, params: Mapping[str, Any], session: str | None = None) -> dict[str, Any]:
        """The result of a command; events that come before it go to their pages."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": dict(params)}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if (page := self.pages.get(answer.get("sessionId", ""))) is not None:
                page.receive(answer["method"], answer["params"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            data = os.read(self._read_fd, 1 << 20)
            assert data, "the browser is gone"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1280, height: int = 800, scheme: str = "light", hash: str = "") -> Page:
        """A new tab with a local file, loaded."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.go(path.resolve().as_uri() + hash)
        return page

    def close(self) -> None:
        self.call("Browser.close", {})
        os.close(self._write_fd)
        os.close(self._read_fd)


class Page:
    """A tab. ``errors``: what its console complained about; ``requests``: every address that it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self._is_loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def receive(self, event: str, params: Mapping[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Page.loadEventFired":
            self._is_loaded = True

    def go(self, url: str) -> None:
        """Load an address and wait for it."""
        self._is_loaded = False
        self.call("Page.navigate", url=url)
        while not self._is_loaded:
            self.call("Runtime.evaluate", expression="0")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it; what it throws is an error of the test."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector: str) -> int:
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def box(self, selector: str) -> dict[str, float]:
        """Position and size of an element in the window, scrolled into sight; fails if it is not there."""
        find = f"document.querySelector({json.dumps(selector)})"
        assert self.evaluate(f"{find} !== null"), f"no element {selector}"
        return self.evaluate(
            f"(e => (e.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}}),"
            f" e.getBoundingClientRect().toJSON()))({find})"
        )

    def click(self, selector: str) -> None:
        """Press and release the mouse on the middle of an element."""
        box = self.box(selector)
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key by its DOM name."""
        code = _KEY_CODES.get(key, ord(key[0].upper()))
        details = {"key": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **details, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **details)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
