"""Writes a bundle: under a temporary name first, so that a folder with the final name is always whole."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.manifest import MANIFEST_FILE, FileRef

PARTIAL, _OLD = ".partial", ".old"
_STALE_SECONDS = 24 * 3600
"""Longer than any build writes: what is older was left by one that was killed."""


@contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """A new folder beside ``output`` that takes its name when the block ends, and is removed if the block fails.

    An earlier bundle of that name is replaced at the end; of several builds at once the last one to end stays. Raises
    what `check_output` does, and `BuildError` for an OSError inside the block, such as a full disk.
    """
    check_output(output)
    output = output.resolve()
    # mkdtemp would make a folder, and so a bundle, that only its owner can read.
    staging = output.with_name(f".{output.name}.{secrets.token_hex(4)}{PARTIAL}")
    new_parents = [parent for parent in output.parents if not parent.exists()]
    try:
        staging.mkdir(parents=True)
        yield staging
        _replace_folder(staging, output)
        name = f".{glob.escape(output.name)}.{'[0-9a-f]' * 8}"
        remove_stale((*output.parent.glob(name + PARTIAL), *output.parent.glob(name + _OLD)))
    except OSError as error:
        raise BuildError(f"cannot write the bundle {output}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in new_parents:  # innermost first; one in use stays
            with suppress(OSError):
                parent.rmdir()


def check_output(output: Path) -> None:
    """`BuildError` if ``output`` is something other than a bundle, or no folder can be made there."""
    output = output.resolve()
    try:
        is_other_folder = output.is_dir() and any(output.iterdir()) and not (output / MANIFEST_FILE).is_file()
        if is_other_folder or (output.exists() and not output.is_dir()):
            raise BuildError(
                f"{output} exists and is not a bundle, so it is not overwritten; remove it or choose another folder"
            )
        why = why_unwritable(output.parent)
    except OSError as error:
        raise BuildError(f"cannot write to {output}: {error.strerror}; choose another folder") from error
    if why is not None:
        raise BuildError(f"cannot create {output}: {why}; choose another folder")


def why_unwritable(folder: Path) -> str | None:
    """What keeps ``folder``, or the nearest of its parents if it does not exist, from taking files; None if nothing."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


def _replace_folder(staging: Path, output: Path) -> None:
    old = staging.with_suffix(_OLD)
    if output.exists():
        os.replace(output, old)
    try:
        os.replace(staging, output)
    except BaseException:
        if old.exists() and not output.exists():
            os.replace(old, output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_stale(paths: Iterable[Path]) -> None:
    """Remove those of ``paths``, partial files or folders, that a build left which was killed."""
    for path in paths:
        with suppress(FileNotFoundError):  # another build may remove it, too
            # The change time, since a renamed folder keeps its modification time.
            if time.time() - path.stat().st_ctime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def hash_files(folder: Path) -> dict[str, FileRef]:
    """Every file below ``folder`` by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileRef.of(path) for path in files}
