"""What TensorRT for RTX compiles is kept in a file from one process to the next."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_bundles import decode, engine_backend, prompt
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.manifest import ENGINE_FILE, JIT_CACHE_DIR, Manifest
from qwen4exp_trt.runtime.tensorrt.capabilities import Capabilities
from qwen4exp_trt.runtime.tensorrt.jit_cache import JitCache, jit_cache_folder
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = [pytest.mark.trt, pytest.mark.eager("about engines")]

Use = Callable[..., Path]


@pytest.fixture
def use(trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, tmp_path: Path) -> Use:
    """One process: loads the engine with its cache in a folder, runs steps, and closes it; returns the file."""

    def run(*steps: dict[str, Any], where: str | Path = tmp_path / "cache") -> Path:
        engine = engine_backend(trt, engine_bundle, loaded, jit_cache=where)
        for inputs in steps:
            engine.run(inputs)
        path = engine.session.jit_cache.path
        assert path is not None
        engine.close()
        return path

    return run


def kernels(path: Path) -> int:
    """How many there are: the simulator writes a line for each."""
    return len(path.read_text().splitlines()) - 1


def test_it_grows_by_what_is_new(use: Use, engine_bundle: Path, trt: SimulatedTensorRT) -> None:
    path = use(prompt(20))
    sha256 = Manifest.load(engine_bundle).files[ENGINE_FILE].sha256
    assert path.name == f"{sha256[:16]}-tensorrt_rtx-{trt.__version__}-sm121.jit"
    assert kernels(path) == 1 and path.parent.stat().st_nlink and list(path.parent.iterdir()) == [path]
    use(decode(0))
    assert kernels(path) == 2
    inode = path.stat().st_ino
    use(decode(0), prompt(20))
    assert kernels(path) == 2 and path.stat().st_ino == inode, "not written again"


def test_what_a_captured_step_needed_is_kept_at_once(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, tmp_path: Path
) -> None:
    """A process may be killed."""
    engine = engine_backend(trt, engine_bundle, loaded, jit_cache=tmp_path)
    (path,) = tmp_path.iterdir()
    assert kernels(path) == 0, "nor is what contexts needed lost"
    engine.run(decode(0))
    assert kernels(path) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\x00damaged", b"simulated runtime cache of tensorrt_rtx 0.0\nkernel"])
def test_a_damaged_or_foreign_file_is_replaced(use: Use, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    path = use(prompt(20))
    good = path.read_bytes()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert use(prompt(20)) == path
    (warning,) = caplog.messages
    assert f"{path}: TensorRT does not take these compiled kernels (damaged, or of another GPU, driver" in warning
    assert path.read_bytes() == good


def test_a_folder_that_cannot_be_used_is_a_warning(
    use: Use, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        engine_path = use_and_ignore(use, tmp_path / "file" / "below")
    assert engine_path is None
    assert sum("cannot" in message for message in caplog.messages) == 2, "reading, and the first time of writing"


def use_and_ignore(use: Use, where: Path) -> Path | None:
    try:
        return use(prompt(20), decode(0), where=where)
    except AssertionError:  # no path is left
        return None


def test_a_full_disk_leaves_nothing_half_written(
    use: Use, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = use(prompt(20))
    good = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        use_and_ignore(use, path.parent)
    assert "cannot keep the engine's compiled kernels there: [Errno 28]" in caplog.text
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == good


def test_processes_side_by_side_leave_a_whole_file(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, tmp_path: Path
) -> None:
    """Each writes what it has; the last one stays."""
    first, second = (engine_backend(trt, engine_bundle, loaded, jit_cache=tmp_path) for _ in range(2))
    first.run(prompt(20))
    second.run(prompt(30))
    second.run(prompt(25))
    first.close()
    second.close()
    (path,) = tmp_path.iterdir()
    assert kernels(path) == 2
    assert JitCache(path).path == path


def test_places(engine_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rtx = Capabilities(load_trt("tensorrt-rtx"))
    places = [jit_cache_folder(where, engine_bundle, rtx) for where in ("user", "bundle", "none", "/a/folder")]
    assert places == [
        tmp_path / "qwen4exp-trt" / "engines",
        engine_bundle / JIT_CACHE_DIR,
        None,
        Path("/a/folder"),
    ]
    other = Capabilities(SimpleNamespace(__name__="tensorrt"))  # pyright: ignore[reportArgumentType]
    assert jit_cache_folder("user", engine_bundle, other) is None is jit_cache_folder("none", engine_bundle, other)
    for where in ("bundle", "/a/folder"):
        with pytest.raises(BundleError, match=r"but tensorrt compiles nothing when an engine runs, so it has no such"):
            jit_cache_folder(where, engine_bundle, other)


def test_a_bundle_may_hold_it_and_nothing_else(
    trt: SimulatedTensorRT, engine_bundle: Path, loaded: EagerBackend, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(engine_bundle, tmp_path / "copy"))
    engine = engine_backend(trt, copy, loaded, jit_cache="bundle")
    engine.run(prompt(20))
    engine.close()
    (path,) = (copy / JIT_CACHE_DIR).iterdir()
    assert kernels(path) == 1
    Manifest.load(copy).check_files(copy)
    for name in (f"{JIT_CACHE_DIR}/below/file", "file"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("")
        with pytest.raises(BundleError, match=f"damaged bundle: {name} is not in its list of files"):
            Manifest.load(copy).check_files(copy)
        (copy / name).unlink()


def test_a_file_is_no_folder(trt: SimulatedTensorRT, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("of somebody")
    with pytest.raises(BundleError, match=r"jit_cache \(--jit-cache\) is '.*file', but .*file is no folder; give the"):
        jit_cache_folder(path, tmp_path, Capabilities(trt))
    assert path.read_text() == "of somebody"
