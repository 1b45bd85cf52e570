"""Keeps what TensorRT for RTX compiles when an engine runs, so that the next process need not compile it again."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.compile import user_cache_dir, write_atomically
from qwen4exp_trt.runtime.manifest import JIT_CACHE_DIR, Manifest
from qwen4exp_trt.runtime.tensorrt.capabilities import Capabilities

logger = logging.getLogger(__name__)

USER, BUNDLE, NONE = "user", "bundle", "none"
"""Where it is: below ``$XDG_CACHE_HOME/qwen4exp-trt`` (by default ``~/.cache``), in the bundle's folder, or nowhere.
Any other value is a folder."""


def jit_cache_folder(where: str | Path, bundle: Path, capabilities: Capabilities) -> Path | None:
    """The folder that ``where`` means for ``bundle``, or None; `BundleError` if a module has no such cache, or it is
    no folder."""
    if not capabilities.compiles_at_run_time:
        if where not in (USER, NONE):
            raise BundleError(
                f"jit_cache (--jit-cache) is {str(where)!r}, but {capabilities.trt.__name__} compiles nothing when an "
                "engine runs, so it has no such cache; leave the option out"
            )
        return None
    known = {USER: user_cache_dir() / "engines", BUNDLE: bundle / JIT_CACHE_DIR, NONE: None}
    folder = known[str(where)] if str(where) in known else Path(where)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise BundleError(
            f"jit_cache (--jit-cache) is {str(where)!r}, but {folder} is no folder; give the folder that the compiled "
            "kernels are kept in"
        )
    return folder


def file_name(trt: ModuleType, manifest: Manifest, engine: str) -> str:
    """Of the cache of the bundle's file ``engine``; another engine, TensorRT or GPU has another."""
    return f"{manifest.files[engine].sha256[:16]}-{trt.__name__}-{trt.__version__}-{manifest.target}.jit"


class JitCache:
    """The cache of one engine, in the file ``path``. None: it lasts as long as the process.

    A file that TensorRT does not take, damaged or of another driver, is replaced; that and a file that cannot be
    written are warnings. Several processes may have it at once: it is written under another name and renamed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._cache: Any = None
        self._num_bytes = 0
        """In the file."""
        self.loaded_bytes = 0
        """That were taken over from the file; 0 if there was nothing."""

    def attach(self, config: Any) -> None:
        """Let contexts of the ``IRuntimeConfig`` use it; the first call reads the file."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._load()
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write what was compiled since the last time."""
        if self.path is None or self._cache is None:
            return
        memory = self._cache.serialize()
        if memory is None or memory.nbytes <= self._num_bytes:
            return
        try:
            write_atomically(self.path, bytes(memory))
        except OSError as error:
            logger.warning("%s: cannot keep the engine's compiled kernels there: %s", self.path, error)
            self.path = None
            return
        logger.info("%s: %s bytes of compiled kernels", self.path, f"{memory.nbytes:,}")
        self._num_bytes = memory.nbytes

    def close(self) -> None:
        """Save, and let go of TensorRT's object."""
        self.save()
        self._cache = None

    def _load(self) -> None:
        if self.path is None:
            return
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning(
                "%s: cannot read the engine's compiled kernels, so they are compiled again: %s", self.path, error
            )
            return
        if data and self._cache.deserialize(data):
            self._num_bytes = self.loaded_bytes = len(data)
            return
        logger.warning(
            "%s: TensorRT does not take these compiled kernels (damaged, or of another GPU, driver or TensorRT), so "
            "they are compiled again and the file is replaced",
            self.path,
        )
