"""The folder of converted weights: found again, resumed, never half-written, and refused when it is damaged."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from conversions import Planned, contents, plan_conversions_of
from quantized_checkpoints import Release, store_bf16, write_random
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qwen4exp_trt.builder import bundle as bundle_module
from qwen4exp_trt.builder import convert as convert_module
from qwen4exp_trt.builder.convert import Conversion, ConvertedFolder
from qwen4exp_trt.errors import BuildError, CheckpointError
from qwen4exp_trt.runtime.specs import Source
from qwen4exp_trt.runtime.tensor_reader import TensorReader

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def few_table_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_module, "_MAX_TABLE_FILES", 4)
        yield


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1]}
    write_random(folder, Release(store_bf16, store_bf16, {}), **layers)
    return folder


@pytest.fixture(scope="module")
def planned(checkpoint_dir: Path) -> Planned:
    return plan_conversions_of(checkpoint_dir, ple="nvfp4")


@pytest.fixture(scope="module")
def whole(planned: Planned, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an undisturbed conversion leaves."""
    folder = ConvertedFolder(tmp_path_factory.mktemp("whole"))
    planned.convert(folder)
    return contents(folder.path)


@pytest.fixture
def folder(tmp_path: Path) -> ConvertedFolder:
    return ConvertedFolder(tmp_path / "converted")


# --- found again ----------------------------------------------------------------------------------------------------


def test_a_second_conversion_has_nothing_to_do(
    planned: Planned, whole: dict[str, str], folder: ConvertedFolder
) -> None:
    assert planned.convert(folder) == planned.conversions
    assert planned.convert(folder) == []
    assert contents(folder.path) == whole, "equal weights are equal files"
    assert folder.path.stat().st_mode & 0o777 == 0o755


def test_progress_counts_all_elements_of_what_is_missing(planned: Planned, folder: ConvertedFolder) -> None:
    (conversion, *others), shown = planned.conversions, list[tuple[int, int]]()
    Planned(planned.checkpoint, planned.plan, others).convert(folder)
    planned.convert(folder, lambda done, total: shown.append((done, total)))
    assert shown == sorted(shown) and shown[-1] == (conversion.num_elements, conversion.num_elements)


# --- interrupted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, OSError])
def test_an_interrupted_conversion_is_resumed(
    planned: Planned, whole: dict[str, str], folder: ConvertedFolder, error: type[BaseException]
) -> None:
    """Also by an OSError of the progress, which is none of the disk."""
    first = sum(conversion.num_elements for conversion in planned.conversions[:5])

    def fail(done: int, total: int) -> None:
        if done > first:
            raise error

    with pytest.raises(error):
        planned.convert(folder, fail)
    finished = {conversion.file for conversion in planned.conversions[:5]}
    assert contents(folder.path) == {name: whole[name] for name in finished}
    assert planned.convert(folder) == planned.conversions[5:]
    assert contents(folder.path) == whole


KILLED = """
import sys, time
from pathlib import Path
from conversions import plan_conversions_of
from qwen4exp_trt.builder import convert

convert._MAX_TABLE_FILES = 4
save, saved = convert.save_file, []

def save_two_and_a_half(tensors, path, metadata):
    if len(saved) == 2:
        Path(path).write_bytes(b"half")
        print("writing", flush=True)
        time.sleep(60)
    saved.append(path)
    save(tensors, path, metadata)

convert.save_file = save_two_and_a_half
plan_conversions_of(Path(sys.argv[1]), ple="nvfp4").convert(convert.ConvertedFolder(Path(sys.argv[2])))
"""


def test_a_killed_conversion_is_resumed(
    planned: Planned,
    whole: dict[str, str],
    checkpoint_dir: Path,
    folder: ConvertedFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was being written stays under a name of its own until it is old."""
    command = [sys.executable, "-c", KILLED, str(checkpoint_dir), str(folder.path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS / "support"), str(TESTS.parent / "src")])}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    finished = {conversion.file for conversion in planned.conversions[:2]}
    (partial,) = set(contents(folder.path)) - finished
    assert partial.endswith(".partial")
    assert planned.convert(folder) == planned.conversions[2:]
    assert set(contents(folder.path)) == {*whole, partial}, "another build may be writing it"
    monkeypatch.setattr(bundle_module, "_STALE_SECONDS", -1)
    folder.convert([], None, lambda done, total: None)  # type: ignore[arg-type]
    assert contents(folder.path) == whole


def test_two_builds_at_once_leave_the_same_files(
    planned: Planned, whole: dict[str, str], folder: ConvertedFolder
) -> None:
    """Both convert everything, and the later one replaces what is there by the same bytes."""
    together = threading.Barrier(2, timeout=60)

    def convert(_: int) -> None:
        met = False

        def meet(done: int, total: int) -> None:
            nonlocal met
            if not met:
                together.wait()
            met = True

        assert planned.convert(folder, meet) == planned.conversions

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(convert, range(2)))
    assert contents(folder.path) == whole


def test_a_file_that_another_build_replaces_stays_readable(planned: Planned, folder: ConvertedFolder) -> None:
    """It is replaced as a whole, not written over."""
    planned.convert(folder)
    path = folder.path / planned.conversions[0].file
    before = path.stat().st_ino
    with path.open("rb") as reader, TensorReader(planned.checkpoint) as source:
        folder.convert(planned.conversions[:1], source, lambda done, total: None)
        assert path.stat().st_ino != before
        assert reader.read() == path.read_bytes()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=repr)
def test_what_is_half_written_is_removed(
    planned: Planned, folder: ConvertedFolder, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(convert_module, "save_file", fail)
    with pytest.raises(BuildError if isinstance(error, OSError) else KeyboardInterrupt):
        planned.convert(folder)
    assert contents(folder.path) == {}


# --- the disk -------------------------------------------------------------------------------------------------------


def table_of_the_released_size() -> Conversion:
    return Conversion("layers.1.ple.table", Source("table"), (320_001_536, 160), 1, 0, ".0", "key")


@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_is_noticed_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exists: bool) -> None:
    folder = ConvertedFolder(tmp_path if exists else tmp_path / "a" / "b")
    needed = table_of_the_released_size().num_bytes
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(convert_module.shutil, "disk_usage", usage)
    free = needed
    assert folder.check_space([table_of_the_released_size()]) == (needed, needed)
    free = needed - 1
    with pytest.raises(BuildError, match=r"need 26\.82 GiB more, and the disk has 26\.82 GiB"):
        folder.check_space([table_of_the_released_size()])
    free = 10 << 30
    with pytest.raises(BuildError) as caught:
        folder.check_space([table_of_the_released_size()])
    assert str(caught.value) == (
        f"{folder.path}: the converted weights need 26.82 GiB more, and the disk has 10.00 GiB; choose a folder on "
        "another disk with --weights-dir"
    )
    assert set(asked) == {tmp_path}


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing more into any file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_in_the_middle(planned: Planned, whole: dict[str, str], folder: ConvertedFolder) -> None:
    sizes = [conversion.num_bytes for conversion in planned.conversions]
    too_large = next(index for index, size in enumerate(sizes) if size > max(sizes[:index], default=size) + 1024)
    with largest_file(max(sizes[:too_large]) + 1000), pytest.raises(BuildError) as caught:
        planned.convert(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder.path}: cannot write the converted weights: ") and "\n" not in message
    assert "large" in message and message.endswith("the finished files stay, so build again when that is solved")
    finished = {conversion.file for conversion in planned.conversions[:too_large]}
    assert finished and contents(folder.path) == {name: whole[name] for name in finished}
    assert planned.convert(folder) == planned.conversions[too_large:]
    assert contents(folder.path) == whole


def not_a_folder(path: Path) -> None:
    path.write_text("a file")


def not_writable(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    path.mkdir(mode=0o555)


@pytest.mark.parametrize("make", [not_a_folder, not_writable])
@pytest.mark.parametrize("below", ["", "converted"])
def test_a_folder_that_cannot_be_written(
    planned: Planned, tmp_path: Path, make: Callable[[Path], None], below: str
) -> None:
    make(tmp_path / "x")
    folder = ConvertedFolder(tmp_path / "x" / below)
    folder.check_space(planned.conversions)
    with pytest.raises(BuildError, match=rf"^{folder.path}: cannot write the converted weights: .* is not "):
        planned.convert(folder)


# --- damage ---------------------------------------------------------------------------------------------------------


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def exchange(path: Path, other: Path) -> None:
    shutil.copyfile(other, path)


def other_tensors(path: Path, other: Path) -> None:
    """Of the right names, but made for something else."""
    save_file(load_file(path), path, {"key": "another"})


def no_metadata(path: Path, other: Path) -> None:
    save_file(load_file(path), path)


DAMAGE = {
    truncate: "truncated or damaged: .*; remove it and build the bundle again",
    empty: "truncated or damaged: 0 bytes, .*; remove it and build the bundle again",
    exchange: r"does not hold the converted lm_head\.weight; remove it and build the bundle again",
    other_tensors: r"does not hold the converted lm_head\.weight; remove it and build the bundle again",
    no_metadata: r"does not hold the converted lm_head\.weight; remove it and build the bundle again",
}


def files_of_head(planned: Planned, folder: Path) -> tuple[Path, Path]:
    """The file of the head, and another one."""
    head, other = (
        c for c in planned.conversions if c.weight in ("lm_head.weight", "layers.0.linear_attn.in_proj_z.weight")
    )
    return folder / head.file, folder / other.file


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused(
    planned: Planned, folder: ConvertedFolder, damage: Callable[[Path, Path], None]
) -> None:
    planned.convert(folder)
    path, other = files_of_head(planned, folder.path)
    damage(path, other)
    assert folder.missing(planned.conversions) == []
    with pytest.raises((BuildError, CheckpointError), match=f"^{path}: {DAMAGE[damage]}$"):
        folder.open(planned.conversions)
    path.unlink()
    (missing,) = planned.convert(folder)
    assert missing.weight == "lm_head.weight"
    assert "lm_head.weight#codes" in folder.open(planned.conversions)


def test_other_files_of_the_folder_are_left_alone(planned: Planned, folder: ConvertedFolder) -> None:
    folder.path.mkdir()
    (folder.path / "other.safetensors").write_bytes(b"of another checkpoint")
    planned.convert(folder)
    opened = folder.open(planned.conversions)
    assert set(opened.files) == {conversion.file for conversion in planned.conversions}
    assert (folder.path / "other.safetensors").read_bytes() == b"of another checkpoint"


def test_a_file_says_what_it_was_made_for(planned: Planned, folder: ConvertedFolder) -> None:
    """In one entry: safetensors writes several in random order."""
    planned.convert(folder)
    for conversion in planned.conversions:
        with safe_open(folder.path / conversion.file, framework="pt") as file:
            (described,) = file.metadata().values()
        assert described.split()[0] == conversion.key


def test_damaged_content_is_not_taken_over(planned: Planned, folder: ConvertedFolder) -> None:
    """Though name, size, header and key are right."""
    planned.convert(folder)
    path = folder.path / planned.conversions[0].file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BuildError, match=rf"^{path}: does not hold the converted .*; remove it and build"):
        folder.open(planned.conversions)
