"""A module with TensorRT's names and nothing behind them, for machines that have a GPU and no TensorRT.

It is what `trt_simulator.SimulatedTensorRT` takes the rest of the module from: enumerations whose members are their
names, and classes that keep what they are made of.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


class _Members(type):
    """A class has every member that is asked for: its name."""

    __members__: dict[str, str] = {}  # noqa: RUF012 - of `EngineInvalidityDiagnostics`, none

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Fields(list):
    """A ``PluginFieldCollection``."""


class _Field:
    """A ``PluginField``, whose data reads back as it was given."""

    def __init__(self, name: str, data: Any, type: Any) -> None:
        self.name, self.data, self.type = name, data, type


class StubTensorRT(ModuleType):
    """``tensorrt_rtx`` in name. Every name that starts with a capital is a class."""

    PluginFieldCollection, PluginField, Dims = _Fields, _Field, tuple

    def __init__(self) -> None:
        super().__init__("tensorrt_rtx")
        self.__version__ = "stub"

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)
        made = _Members(name, (), {"__init__": lambda self, *args: None})
        setattr(self, name, made)
        return made
