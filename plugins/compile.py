"""Compiles the CUDA kernels to cubins with NVRTC, through ``cuda.core``; needs no GPU. Cubins are cached by content."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import re
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import MIN_CAPABILITY, Kernel, define_flags

SOURCES = Path(__file__).parent
_INCLUDE = SOURCES / "include"
_IMPORTING = threading.Lock()
"""Threads that compile side by side must not find a module that another is still importing."""
_INSTALL = "pip install 'qwen4exp-trt[cuda]'"


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel with the compiler's log. ``key`` names it in a cache and in a bundle."""

    key: str
    code: bytes
    entry: str
    log: str

    @property
    def registers(self) -> int:
        """Of a thread."""
        return self._number(r"Used (\d+) registers")

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block."""
        return self._number(r"(\d+) bytes smem")

    @property
    def spill_bytes(self) -> int:
        return self._number(r"(\d+) bytes spill stores") + self._number(r"(\d+) bytes spill loads")

    @property
    def stack_bytes(self) -> int:
        return self._number(r"(\d+) bytes stack frame")

    def _number(self, pattern: str) -> int:
        start = self.log.find(f"function '{self.entry}'")
        if start < 0:
            raise PluginError(f'the compiler\'s log does not mention {self.entry}; is it extern "C"?\n{self.log}')
        found = re.search(pattern, self.log[start:].split("Compiling entry function", 1)[0])
        return int(found.group(1)) if found else 0


def architecture(capability: tuple[int, int]) -> str:
    """The compiler's name of a compute capability, ``sm_121a``; from SM100 on with its own instructions (``a``)."""
    major, minor = capability
    if capability < MIN_CAPABILITY:
        raise PluginError(f"the kernels need compute capability 8.0 or later, this GPU has {major}.{minor}")
    return f"sm_{major}{minor}{'a' if major >= 10 else ''}"


def capability_of(arch: str) -> tuple[int, int]:
    """The compute capability of an `architecture`."""
    return divmod(int(arch.removeprefix("sm_").removesuffix("a")), 10)


def cubin_key(kernel: Kernel, arch: str) -> str:
    """Hash of all that decides about what a kernel does: source, headers, macros and target."""
    parts = [kernel.source, kernel.entry, *define_flags(kernel.defines), arch, _source(kernel.source), _headers()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def compile_kernel(kernel: Kernel, arch: str) -> Cubin:
    """Compile without a cache. `PluginError` with the compiler's message if it fails."""
    cuda = _cuda_core()
    options = cuda.ProgramOptions(
        name=kernel.source,
        arch=arch,
        std="c++17",
        include_path=[str(_INCLUDE), str(SOURCES)],
        define_macro=define_flags(kernel.defines),
        ptxas_options=["-v"],
        no_cache=True,  # NVRTC's own would leave the log empty
        device_as_default_execution_space=True,
    )
    log = io.StringIO()
    try:
        program = cuda.Program(_source(kernel.source), "c++", options)
        code = program.compile("cubin", logs=log)
    except Exception as error:
        raise PluginError(f"{kernel.source} does not compile for {arch} with {kernel.defines}:\n{error}") from error
    return Cubin(cubin_key(kernel, arch), bytes(code.code), kernel.entry, log.getvalue())


def load_cubin(kernel: Kernel, arch: str, folders: Sequence[Path] = ()) -> bytes:
    """The code of ``kernel``: from one of ``folders`` (of bundles), from the cache, or compiled and then cached."""
    name = f"{cubin_key(kernel, arch)}.cubin"
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_bytes()
    cached = cache_dir() / _compiler_version() / name
    if cached.is_file():
        return cached.read_bytes()
    code = compile_kernel(kernel, arch).code
    write_atomically(cached, code)
    return code


def load_cubins(kernels: Sequence[Kernel], arch: str) -> list[bytes]:
    """`load_cubin` of each, compiled side by side on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda kernel: load_cubin(kernel, arch), kernels))


def supported_architectures() -> list[str]:
    """Every architecture that NVRTC here compiles the kernels for; `PluginError` if it is not installed."""
    error, found = _nvrtc().nvrtcGetSupportedArchs()
    assert not error, error
    return [architecture(divmod(number, 10)) for number in found if divmod(number, 10) >= MIN_CAPABILITY]


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``path`` under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not a file of `tempfile`, which others could not read.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/qwen4exp-trt/kernels``, by default below ``~/.cache``."""
    return user_cache_dir() / "kernels"


def user_cache_dir() -> Path:
    """Where everything is kept that outlives a process and can be made again."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "qwen4exp-trt"


@cache
def _source(path: str) -> str:
    return (SOURCES / path).read_text()


@cache
def _headers() -> str:
    """Every CUDA header, since a kernel may include any."""
    return "\0".join(file.read_text() for file in sorted(SOURCES.rglob("*.cuh")))


def _cuda_core() -> Any:
    with _IMPORTING:
        return _import_cuda_core()


@cache
def _import_cuda_core() -> Any:
    try:
        core: Any = importlib.import_module("cuda.core")
    except ImportError as error:
        raise PluginError(f"CUDA kernels need cuda-python, which is not installed; run: {_INSTALL}") from error
    return core


@cache
def _compiler_version() -> str:
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"nvrtc-{major}.{minor}"


def _nvrtc() -> Any:
    _cuda_core()
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise PluginError(f"NVRTC, which compiles the CUDA kernels, is not installed; run: {_INSTALL}") from error
    return nvrtc
