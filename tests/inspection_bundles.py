"""Bundles for tests of their inspection: made quickly, and changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qwen4exp_trt.builder import planning
from qwen4exp_trt.runtime.manifest import FileRef, Manifest


def rewrite(bundle: Path, name: str, change: Callable[[str], str]) -> None:
    """Change the text of a file of the bundle, whose manifest then says that it is so."""
    path = bundle / name
    path.write_text(change(path.read_text()))
    manifest = Manifest.load(bundle)
    manifest.files[name] = FileRef.of(path)
    manifest.save(bundle)


@contextmanager
def no_estimates() -> Iterator[None]:
    """Builds without the estimate of activations, which no test here looks at: a second each."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("estimate_activations", "estimate_workspace"):
            patch.setattr(planning, name, lambda *step: 0)
        yield
