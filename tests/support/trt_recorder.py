"""Records what our code asks of TensorRT's objects while it runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from source_tree import PACKAGES, ROOT

_DERIVED_FROM = ("IPlugin", "ILogger", "IVersionedInterface")
"""Classes that ours derive from: TensorRT would take what is put into them for methods of ours."""


def record_uses(trt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(class, member) of all that our packages read, set or call from now on. The set grows."""
    seen: set[tuple[str, str]] = set()
    for cls in vars(trt).values():
        if inspect.isclass(cls) and not cls.__name__.startswith(_DERIVED_FROM) and not hasattr(cls, "__members__"):
            for name, value in list(vars(cls).items()):
                if not name.startswith("__") and name != "_pybind11_conduit_v1_":
                    _wrap(monkeypatch, seen, cls, name, value)
    return seen


def _wrap(monkeypatch: pytest.MonkeyPatch, seen: set[tuple[str, str]], cls: type, name: str, value: Any) -> None:
    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_ours(sys._getframe(1).f_code.co_filename):
                seen.add((cls.__name__, name))
            return function(*args, **kwargs)

        return call

    if type(value) is property:
        getter, setter = (function and noting(function) for function in (value.fget, value.fset))
        monkeypatch.setattr(cls, name, property(getter, setter))
    elif inspect.isroutine(value) and not isinstance(value, staticmethod):
        monkeypatch.setattr(cls, name, noting(value))


@cache
def _is_ours(file: str) -> bool:
    return any(Path(file).resolve().is_relative_to(ROOT / package) for package in PACKAGES)
