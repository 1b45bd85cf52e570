"""What the Python bindings of TensorRT have: names, methods, arguments.

`python tools/tensorrt_api.py tests/fixtures/tensorrt_11_api.json` describes the bindings of the package `tensorrt` and
writes it down. They are taken from their wheel and imported over empty libraries, since the real ones take gigabytes
and need a GPU's driver: that is enough to read docstrings, from which all is known. Needs network, `cc` and `nm`.
"""

from __future__ import annotations

import argparse
import ctypes
import enum
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "tensorrt-cu13-bindings"
VERSION = "11.4.0.106"
_MODULE = "tensorrt_bindings"
_SIGNATURE = r"(\d+\. )?{name}\((.*)\) -> (.*)"
_SPECIAL_METHODS = ("__init__", "__getitem__", "__iter__", "__len__")
_OBJECT_MEMBERS = frozenset(dir(enum.IntEnum)) | {"__members__", "_pybind11_conduit_v1_", "__entries"}


# --- description ----------------------------------------------------------------------------------------------------


def describe(trt: ModuleType) -> dict[str, Any]:
    """``classes``: name -> ``bases``, ``methods`` (name -> overloads), ``properties`` (name -> type and whether it can
    be set) and ``values`` (members of enums, constants). ``functions``: name -> overloads. ``values``: other names.

    An overload has ``args`` (``name: type``, with ``=`` behind a default) without self, and ``returns``. Types are
    those of the docstrings, without their module; an overload is missing if its docstring does not tell.
    """
    names = {name: getattr(trt, name) for name in dir(trt) if not name.startswith("_")}
    names = {name: value for name, value in names.items() if not inspect.ismodule(value)}
    classes = {name: value for name, value in names.items() if inspect.isclass(value)}
    functions = {name: value for name, value in names.items() if inspect.isroutine(value)}
    return {
        "version": trt.__version__,
        "classes": {name: _describe_class(value) for name, value in classes.items()},
        "functions": {name: list(_overloads(name, value)) for name, value in functions.items()},
        "values": sorted(names.keys() - classes.keys() - functions.keys()),
    }


def _describe_class(cls: type) -> dict[str, Any]:
    """What the class itself has; its bases have the rest."""
    described: dict[str, Any] = {
        "bases": [base.__name__ for base in cls.__bases__ if base.__module__ == cls.__module__],
        "methods": {},
        "properties": {},
        "values": [],
        "enum": hasattr(cls, "__members__"),
    }
    for name, value in vars(cls).items():
        if name in _SPECIAL_METHODS or (name not in _OBJECT_MEMBERS and not name.startswith("__")):
            if isinstance(value, property):
                described["properties"][name] = {"type": _property_type(value), "settable": value.fset is not None}
            elif inspect.isroutine(value) or isinstance(value, staticmethod):
                described["methods"][name] = list(_overloads(name, getattr(cls, name)))
            else:
                described["values"].append(name)
    return described


def _overloads(name: str, function: Any) -> Iterator[dict[str, Any]]:
    if inspect.isfunction(function):
        yield {"args": [f"{arg}: Any" for arg in inspect.signature(function).parameters], "returns": "Any"}
        return
    for line in (function.__doc__ or "").splitlines():
        match = re.fullmatch(_SIGNATURE.format(name=re.escape(name)), line)
        if match and match[2] != "*args, **kwargs":
            args = [_argument(arg) for arg in _split(match[2])]
            yield {"args": [arg for arg in args if not arg.startswith("self:")], "returns": _type(match[3])}


def _property_type(value: property) -> str:
    documented = re.search(r"\) -> (.*)", (value.fget.__doc__ or "") if value.fget else "")
    return _type(documented[1]) if documented else "Any"


def _argument(text: str) -> str:
    argument, _, default = text.partition(" = ")
    name, _, kind = argument.partition(": ")
    return f"{name}: {_type(kind)}" + ("=" if default else "")


def _type(text: str) -> str:
    return re.sub(r"\b\w+::|\b[a-z_0-9]+\.", "", text.strip())


def _split(args: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, depth = [""], 0
    for character in args:
        depth += (character in "[(<{") - (character in "])>}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


# --- the package tensorrt -------------------------------------------------------------------------------------------


class NoWheelError(Exception):
    """There is no wheel of that version for this Python, or no network."""


def describe_wheel(version: str) -> dict[str, Any]:
    """`describe` of a version of the bindings of ``tensorrt``, read by a process of its own. Raises NoWheelError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = f"{PACKAGE}=={version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", wheel]
        downloaded = subprocess.run([*pip, "--dest", name], capture_output=True, text=True)
        if downloaded.returncode != 0:
            raise NoWheelError(f"{wheel} cannot be downloaded: {downloaded.stderr.strip()}")
        for path in folder.glob("*.whl"):
            zipfile.ZipFile(path).extractall(folder)
        _make_stubs(next((folder / _MODULE).glob("*.so")))
        process = subprocess.run([sys.executable, __file__, "--of-folder", name], check=True, stdout=subprocess.PIPE)
        return {"package": PACKAGE} | json.loads(process.stdout)


def _make_stubs(binding: Path) -> None:
    """Beside ``binding``, where it looks first, a library for each that it needs and this machine lacks. The first one
    defines the functions that nothing else does; the import calls some and does without their results."""
    dynamic = subprocess.run(["readelf", "-d", binding], check=True, capture_output=True, text=True).stdout
    needed = [name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic) if name.startswith("libnv")]
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", binding], check=True, capture_output=True, text=True
    ).stdout
    undefined = re.findall(r"^ +U (\w+)$", symbols, re.MULTILINE)
    process = ctypes.CDLL(None)
    missing = [symbol for symbol in undefined if not symbol.startswith("Py") and not hasattr(process, symbol)]
    for index, library in enumerate(needed):
        source = "".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in missing) if index == 0 else ""
        compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{library}", "-o", binding.parent / library]
        subprocess.run(compiler, check=True, input=source, text=True)


def _import_folder(folder: Path) -> ModuleType:
    sys.path.insert(0, str(folder))
    sys.setdlopenflags(os.RTLD_LAZY)
    return importlib.import_module(_MODULE)


def write(path: Path, api: dict[str, Any]) -> None:
    """A line for each class, so that a new version makes a readable difference."""
    classes = [
        f"{json.dumps(name)}: {json.dumps(api['classes'][name], sort_keys=True)}" for name in sorted(api["classes"])
    ]
    others = [
        f"{json.dumps(name)}: {json.dumps(api[name], sort_keys=True)}" for name in sorted(api.keys() - {"classes"})
    ]
    path.write_text("{\n" + ",\n".join([*others, '"classes": {\n' + ",\n".join(classes) + "\n}"]) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, help="file to write")
    parser.add_argument("--version", default=VERSION, help="of the bindings; default: %(default)s")
    parser.add_argument("--of-folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of_folder is not None:
        json.dump(describe(_import_folder(args.of_folder)), sys.stdout)
    elif args.output is None:
        parser.error("which file to write?")
    else:
        write(args.output, describe_wheel(args.version))


if __name__ == "__main__":
    main()
