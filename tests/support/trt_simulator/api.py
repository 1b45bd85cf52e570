"""What a double has of the class that it stands for: its members and argument names, no more."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any, ClassVar

from trt_simulator.errors import NotInApiError, SimulatorError

_SIGNATURE = re.compile(r"^(?:\d+\. )?(\w+)\((self: [^)]*)\) -> ", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+): ")


class Double:
    """An object of ``module``'s class `stands_for`.

    Public names that the real class lacks are absent, also to ``hasattr``; those that it has and the simulator does not
    raise `SimulatorError`, and so do calls by other argument names, or more arguments, than its docstrings have.
    A module that is no TensorRT (it lacks the class) is not compared with.
    """

    stands_for: ClassVar[str]

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "stands_for":
            return super().__getattribute__(name)
        real = _check_member(self, name)
        value = super().__getattribute__(name)
        if not inspect.ismethod(value):
            return value
        checked = value if real is None else _checked(value, _signatures(real, name))
        return self._module.call(f"{self.stands_for}.{name}", checked)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            _check_member(self, name)
        super().__setattr__(name, value)


def _check_member(double: Double, name: str) -> type | None:
    """The real class."""
    module, stands_for = double._module, double.stands_for
    real = module.real_class(stands_for)
    if f"{stands_for}.{name}" in module.lacks or (real is not None and not hasattr(real, name)):
        raise NotInApiError(f"TensorRT's {stands_for} has no {name}")
    if not hasattr(type(double), name):
        raise SimulatorError(f"{stands_for}.{name} is not simulated")
    return real


@cache
def _signatures(real: type, name: str) -> tuple[tuple[str, ...], ...]:
    """The names of the arguments behind ``self``, of each overload."""
    found = []
    for match in _SIGNATURE.finditer(getattr(real, name).__doc__ or ""):
        parts = re.split(r", (?=\w+: )", match.group(2))[1:]
        found.append(tuple(argument.group(1) for part in parts if (argument := _ARGUMENT.match(part))))
    return tuple(found)


def _checked(method: Callable[..., Any], signatures: tuple[tuple[str, ...], ...]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        fits = [names for names in signatures if set(kwargs) <= set(names[len(args) :]) and len(args) <= len(names)]
        if signatures and not fits:
            choices = " or ".join(f"({', '.join(names)})" for names in signatures)
            found = ", ".join([*map(repr, args), *(f"{name}=..." for name in kwargs)])
            raise SimulatorError(f"TensorRT's {method.__name__} takes {choices}, not ({found})")
        return method(*args, **kwargs)

    return call


def real_class(module: ModuleType, name: str) -> type | None:
    found = getattr(module, name, None)
    return found if isinstance(found, type) else None
