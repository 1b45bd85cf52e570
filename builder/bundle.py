"""Writes a bundle: under a temporary name first, so that a folder with the final name is always whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.manifest import MANIFEST_FILE, FileRef


@contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """A new folder beside ``output`` that takes its name when the block ends, and is removed if the block fails.

    An earlier bundle of that name is replaced at the end; any other file or folder there is refused at once.
    """
    check_replaceable(output)
    staging = output.with_name(f".{output.name}.partial")
    if staging.exists():
        shutil.rmtree(staging)
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise BuildError(f"cannot create {staging}: {error.strerror}; choose another output folder") from error
    try:
        yield staging
        _replace_folder(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(output: Path) -> None:
    """`BuildError` if ``output`` is something other than a bundle."""
    is_other_folder = output.is_dir() and any(output.iterdir()) and not (output / MANIFEST_FILE).is_file()
    if is_other_folder or (output.exists() and not output.is_dir()):
        raise BuildError(f"{output} exists and is not a bundle, so it is not overwritten; remove it or choose another")


def _replace_folder(staging: Path, output: Path) -> None:
    old = output.with_name(f".{output.name}.old")
    if output.exists():
        os.replace(output, old)
    os.replace(staging, output)
    shutil.rmtree(old, ignore_errors=True)


def hash_files(folder: Path) -> dict[str, FileRef]:
    """Every file below ``folder`` by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileRef.of(path) for path in files}
