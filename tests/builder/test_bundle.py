from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qwen4exp_trt.builder.bundle import check_output, hash_files, staged_folder
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.manifest import MANIFEST_FILE


def write_bundle(folder: Path, text: str) -> None:
    (folder / MANIFEST_FILE).write_text(text)
    (folder / "program").mkdir()
    (folder / "program" / "graph.py").write_text(text)


def make_bundle(output: Path, text: str) -> None:
    with staged_folder(output) as folder:
        write_bundle(folder, text)


def tree(folder: Path) -> dict[str, str]:
    """Text of every file below ``folder``, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else "folder" for path in folder.rglob("*")
    }


def bundle_tree(name: str, text: str) -> dict[str, str]:
    files = {f"{name}/{MANIFEST_FILE}": text, f"{name}/program/graph.py": text}
    return {name: "folder", f"{name}/program": "folder", **files}


def test_folder_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "new" / "parents" / "bundle"
    with staged_folder(output) as folder:
        assert folder.parent == output.parent and not output.exists()
        write_bundle(folder, "a")
    assert tree(output.parent) == bundle_tree("bundle", "a")


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit()])
def test_a_block_that_fails_leaves_nothing_not_even_parents(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), staged_folder(tmp_path / "new" / "parents" / "bundle") as folder:
        write_bundle(folder, "a")
        raise error
    assert tree(tmp_path) == {}


def test_an_earlier_bundle_is_replaced_at_the_end(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", "a")
    (tmp_path / "bundle" / "leftover").write_text("of a")
    with staged_folder(tmp_path / "bundle") as folder:
        write_bundle(folder, "b")
        assert (tmp_path / "bundle" / MANIFEST_FILE).read_text() == "a"
    assert tree(tmp_path) == bundle_tree("bundle", "b")


def test_an_earlier_bundle_survives_a_failure(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", "a")
    with pytest.raises(ValueError), staged_folder(tmp_path / "bundle") as folder:
        write_bundle(folder, "b")
        raise ValueError
    assert tree(tmp_path) == bundle_tree("bundle", "a")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing_call", [1, 2])
def test_an_earlier_bundle_survives_a_failing_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int, error: BaseException
) -> None:
    make_bundle(tmp_path / "bundle", "a")
    original, calls = os.replace, []

    def replace(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == failing_call:
            raise error
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(BuildError if isinstance(error, OSError) else KeyboardInterrupt):
        make_bundle(tmp_path / "bundle", "b")
    assert tree(tmp_path) == bundle_tree("bundle", "a")


def test_full_disk_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught, staged_folder(tmp_path / "bundle"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "decoder.engine")
    expected = f"cannot write the bundle {tmp_path / 'bundle'}: [Errno 28] No space left on device: 'decoder.engine'"
    assert str(caught.value) == expected
    assert tree(tmp_path) == {}


def test_a_killed_build_leaves_the_earlier_bundle_and_does_not_disturb_the_next(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", "a")
    script = (
        "import os, pathlib, signal, sys\n"
        "from qwen4exp_trt.builder.bundle import staged_folder\n"
        "with staged_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'manifest.json').write_text('b')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "bundle"], check=False)
    assert done.returncode == -signal.SIGKILL
    left = tree(tmp_path)
    assert left.items() >= bundle_tree("bundle", "a").items()
    (folder, file) = sorted(set(left) - set(bundle_tree("bundle", "a")))
    assert re.fullmatch(r"\.bundle\.[0-9a-f]{8}\.partial", folder) and file == f"{folder}/manifest.json"
    make_bundle(tmp_path / "bundle", "c")
    assert tree(tmp_path).items() >= bundle_tree("bundle", "c").items()


def test_what_killed_builds_left_is_removed_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {".[b].00c0ffee.partial", ".[b].00c0ffee.old"}
    others = {".[b].backup.old", ".b.00c0ffee.partial", "[b].00c0ffee.partial", ".[b].00c0ffee.partial.txt"}
    for name in left | others:
        (tmp_path / name).mkdir()
    make_bundle(tmp_path / "[b]", "a")
    assert {path.name for path in tmp_path.iterdir()} == left | others | {"[b]"}, "they may be of a build that runs"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    make_bundle(tmp_path / "[b]", "b")
    assert {path.name for path in tmp_path.iterdir()} == others | {"[b]"}


def test_builds_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "bundle") as first:
        write_bundle(first, "a")
        with staged_folder(tmp_path / "bundle") as second:
            write_bundle(second, "b")
        assert tree(tmp_path).items() >= bundle_tree("bundle", "b").items()
        with pytest.raises(ValueError), staged_folder(tmp_path / "bundle"):
            raise ValueError
    assert tree(tmp_path) == bundle_tree("bundle", "a")


def test_a_bundle_has_the_permissions_of_any_new_folder(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", "a")
    (tmp_path / "new").mkdir()
    assert (tmp_path / "bundle").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_only_a_bundle_or_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_bundle(tmp_path / "empty", "a")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")
    before = tree(tmp_path)
    for name in ("file", "full"):
        with pytest.raises(BuildError, match=f"{name} exists and is not a bundle, so it is not overwritten; remove it"):
            check_output(tmp_path / name)
        with pytest.raises(BuildError, match="is not a bundle"):
            make_bundle(tmp_path / name, "a")
    assert tree(tmp_path) == before


def test_a_place_where_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot create .*: .*file is not a folder; choose another folder"):
        check_output(tmp_path / "file" / "below" / "bundle")
    with pytest.raises(BuildError, match="File name too long; choose another folder"):
        check_output(tmp_path / ("x" * 300))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(BuildError, match=f"cannot create .*bundle: {tmp_path} is not writable; choose another folder"):
        check_output(tmp_path / "new" / "bundle")


def test_the_current_folder_and_a_link_can_be_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    make_bundle(Path("."), "a")
    (tmp_path / "link").symlink_to("here")
    make_bundle(tmp_path / "link", "b")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "here" / MANIFEST_FILE).read_text() == "b"
    with pytest.raises(BuildError, match="/ exists and is not a bundle"):
        check_output(Path("/"))


def test_hashes_are_of_every_file(tmp_path: Path) -> None:
    write_bundle(tmp_path, "abc")
    refs = hash_files(tmp_path)
    assert list(refs) == [MANIFEST_FILE, "program/graph.py"]
    assert refs[MANIFEST_FILE].size == 3
    assert refs[MANIFEST_FILE].sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
