"""Imports the TensorRT Python module that a build is asked to use."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType

from qwen4exp_trt.errors import BuildError

MODULE_OF_BACKEND = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
"""Backend name -> the Python module, which is also the name of the pip extra -> import."""

_RTX_LIBRARIES = ("tensorrt_rtx", "tensorrt_onnxparser_rtx")


@cache
def load_trt(backend: str) -> ModuleType:
    """The module of ``backend`` (``tensorrt-rtx`` or ``tensorrt``).

    Raises BuildError when the backend is unknown, its package is not installed, or TensorRT for RTX was imported by
    somebody else, who cannot know what `_preload_rtx_libraries` does.
    """
    if backend not in MODULE_OF_BACKEND:
        raise BuildError(f"unknown backend {backend!r}; choose one of {', '.join(MODULE_OF_BACKEND)}")
    name = MODULE_OF_BACKEND[backend]
    if importlib.util.find_spec(name) is None:
        raise BuildError(
            f"backend {backend} needs the Python module {name}, which is not installed; "
            f"run: pip install 'qwen4exp-trt[{backend}]'"
        )
    if backend == "tensorrt-rtx":
        if name in sys.modules:
            raise BuildError(f"{name} was imported before {__name__}.load_trt, too early; import it through load_trt")
        _preload_rtx_libraries()
    return importlib.import_module(name)


@lru_cache(maxsize=1)
def _preload_rtx_libraries() -> tempfile.TemporaryDirectory[str]:
    """Load the wheel's libraries through links that carry their unversioned names as well.

    At the first plugin node the ONNX parser opens ``libtensorrt_rtx.so`` beside itself, a name that the wheel lacks,
    and aborts the process. A library's idea of where it lies is the path it was first opened by, so it looks among
    the links. The folder must exist until then; the cache keeps it, and it goes away with the process.
    """
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    links = tempfile.TemporaryDirectory(prefix="qwen4exp-trt-")
    if spec is None or spec.origin is None:
        return links  # libraries installed by the system carry both names
    for library in _RTX_LIBRARIES:
        versioned = Path(spec.origin).parent / f"lib{library}.so.1"
        for link in (f"lib{library}.so", versioned.name):
            (Path(links.name) / link).symlink_to(versioned)
    for library in _RTX_LIBRARIES:
        ctypes.CDLL(str(Path(links.name) / f"lib{library}.so.1"))
    return links
