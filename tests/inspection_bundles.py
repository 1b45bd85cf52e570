"""Bundles that are changed for tests of their inspection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qwen4exp_trt.runtime.manifest import FileRef, Manifest


def rewrite(bundle: Path, name: str, change: Callable[[str], str]) -> None:
    """Change the text of a file of the bundle, whose manifest then says that it is so."""
    path = bundle / name
    path.write_text(change(path.read_text()))
    manifest = Manifest.load(bundle)
    manifest.files[name] = FileRef.of(path)
    manifest.save(bundle)
