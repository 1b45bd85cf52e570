"""The API of a TensorRT module, and whether a use of it fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ALIASES = {
    "IParserError": "ParserError",
    "PluginFieldCollection_": "PluginFieldCollection",
    "accessor<str_attr>": "IPluginRegistry",  # what get_plugin_registry says that it returns
}
_PLAIN = frozenset(
    {"None", "int", "float", "bool", "str", "bytes", "object", "ndarray", "tuple", "list", "type", "Buffer"}
    | {"SupportsInt", "SupportsFloat", "CapsuleType"}
)
"""Types that are none of TensorRT."""

UNKNOWN = "?"


@dataclass(frozen=True)
class Use:
    """``kind`` is read, write, call or override. ``owner`` is the class of ``member``, None for the module.

    Of a call: the number of positional arguments and the keywords; ``is_open`` if it has ``*`` or ``**``. Of an
    override: the number of arguments that it takes.
    """

    where: str
    function: str
    kind: str
    owner: str | None
    member: str
    num_args: int = 0
    keywords: tuple[str, ...] = ()
    is_open: bool = False
    is_guarded: bool = False

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.member}" if self.owner else self.member

    def __str__(self) -> str:
        return f"{self.where}: {self.name}"


_UNDOCUMENTED = {"IPluginV3OneBuildV2.get_aliased_input": 1}
"""Methods that TensorRT calls with another number of arguments than their docstrings say. Engines with updated states
show that it does."""


class Api:
    """What `tensorrt_api.describe` gives."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.description = description
        self.classes: Mapping[str, Any] = description["classes"]

    def kind_of(self, name: str) -> str:
        """Of a name of the module: class, function, value, or nothing."""
        if name in self.classes:
            return "class"
        if name in self.description["functions"]:
            return "function"
        return "value" if name in self.description["values"] or name == "__version__" else ""

    def has(self, owner: str | None, member: str) -> bool:
        """Whether there is such a name: of the module without an ``owner``, else of the class."""
        return bool(self.kind_of(member)) if owner is None else self.find(owner, member) is not None

    def find(self, owner: str, member: str) -> tuple[str, Any] | None:
        """(``methods``, overloads), (``properties``, description) or (``values``, None) of a class or its bases."""
        for cls in self.lineage(owner):
            for kind in ("methods", "properties"):
                if member in self.classes[cls][kind]:
                    return kind, self.classes[cls][kind][member]
            if member in self.classes[cls]["values"]:
                return "values", None
        return None

    def overloads(self, owner: str | None, member: str) -> Sequence[Mapping[str, Any]]:
        """Of a function of the module, or of a method; none of what is neither."""
        if owner is None:
            return self.description["functions"].get(member, ())
        kind, found = self.find(owner, member) or ("", ())
        return found if kind == "methods" else ()

    def lineage(self, owner: str) -> Iterator[str]:
        if owner in self.classes:
            yield owner
            for base in self.classes[owner]["bases"]:
                yield from self.lineage(base)

    def problem(self, use: Use) -> str | None:
        """Why ``use`` does not fit this API."""
        if use.owner == UNKNOWN:
            return f"{use}: of which class is this?"
        if use.owner is None:
            kind = self.kind_of(use.member)
            overloads = self.description["functions"].get(use.member)
            if not kind or (use.kind == "call" and kind != "function"):
                return f"{use} is {kind or 'absent'}"
            return self._call_problem(use, overloads) if use.kind == "call" else None
        found = self.find(use.owner, use.member)
        if found is None:
            return f"{use} is absent"
        kind, member = found
        if use.kind == "write":
            return None if kind == "properties" and member["settable"] else f"{use} cannot be set"
        if use.kind == "call":
            return self._call_problem(use, member) if kind == "methods" else f"{use} is no method"
        if use.kind == "override":
            taken = {_UNDOCUMENTED.get(use.name, len(overload["args"])) for overload in member if kind == "methods"}
            return None if use.num_args in taken else f"{use} takes {taken} arguments, ours {use.num_args}"
        return None

    @staticmethod
    def _call_problem(use: Use, overloads: Sequence[Mapping[str, Any]]) -> str | None:
        if any(_takes(overload["args"], use) for overload in overloads):
            return None
        given = f"{use.num_args} arguments" + "".join(f", {keyword}=" for keyword in use.keywords)
        return f"{use} takes {' or '.join(str(overload['args']) for overload in overloads)}, given {given}"


def _takes(args: Sequence[str], use: Use) -> bool:
    names = [arg.partition(":")[0] for arg in args]
    behind = names[use.num_args :]
    if use.num_args > len(names) or not set(use.keywords) <= set(behind):
        return False
    if any(re.fullmatch(r"arg\d+", keyword) for keyword in use.keywords):
        return False  # pybind11's word for an argument without a name
    required = {name for name, arg in zip(names, args, strict=True) if not arg.endswith("=")}
    return use.is_open or not (required & set(behind)) - set(use.keywords)


def parse_type(api: Api, text: str) -> tuple[str, str | None]:
    """(shape, class) of a type in a docstring: shape is ``one``, ``many`` or ``plain``; a class may be `UNKNOWN`."""
    text = text.removesuffix(" | None").strip()
    many = re.fullmatch(r"(?:Sequence|list|Iterator|Iterable)\[(.*)\]", text)
    name = _ALIASES.get(many[1] if many else text, many[1] if many else text)
    if name in _PLAIN or (name.partition(".")[0] in api.classes and "." in name):
        return "plain", None
    return "many" if many else "one", name if name in api.classes else UNKNOWN
