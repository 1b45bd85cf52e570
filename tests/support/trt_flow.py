"""Which values of a program come from TensorRT, and what the program does with them.

All values that a variable, an attribute of a class, a parameter or a result may have are kept in sets, which only grow,
until nothing changes. What TensorRT's functions return is read off their docstrings. Order and conditions are ignored,
but for `hasattr`: what is in its branch, or only reached from there, is guarded.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from trt_api import Api, Use
from trt_frame import Frame
from trt_values import NOTHING, Class, Function, Value, Values, one

_MOST_TEXTS = 64


class Flow:
    """``trees``: module path (``builder.engine``) -> syntax tree. ``uses`` and ``guards`` are the result."""

    def __init__(self, api: Api, trees: Mapping[str, ast.Module]) -> None:
        self.api, self.trees = api, trees
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, Class] = {}
        self.guards: set[tuple[str | None, str]] = set()
        """(class, or None for the module; name) that `hasattr` asks TensorRT about."""
        self._values: dict[tuple[str, str], Values] = {}
        self._readers: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._uses: dict[str, set[Use]] = {}
        self._calls: dict[str, set[tuple[str, str, bool]]] = {}
        self._due: dict[str, None] = dict.fromkeys(trees)
        self._running = ""
        self.bases: dict[str, list[Value]] = {}
        """Of every class of ours, by key."""
        while self._due:
            self._run_due()
            bases = self._find_bases()
            if bases != self.bases:
                self.bases = bases
                self.__dict__.pop("lineages", None)
                self._due = dict.fromkeys([*trees, *self.functions])

    def _run_due(self) -> None:
        while self._due:
            self._running = next(iter(self._due))
            del self._due[self._running]
            self._uses[self._running], self._calls[self._running] = set(), set()
            self._run(self._running)

    @property
    def uses(self) -> set[Use]:
        return set().union(*self._uses.values())

    @cached_property
    def calls(self) -> dict[str, set[tuple[str, bool]]]:
        """Key of a function or class of ours -> (the function that calls it, whether behind a guard)."""
        found: dict[str, set[tuple[str, bool]]] = defaultdict(set)
        for called, caller, is_guarded in set().union(*self._calls.values()):
            found[called].add((caller, is_guarded))
        return found

    def add_use(self, use: Use) -> None:
        self._uses[self._running].add(use)

    def add_call(self, called: str, caller: str, is_guarded: bool) -> None:
        self._calls[self._running].add((called, caller, is_guarded))

    def add_function(self, function: Function) -> None:
        if function.key not in self.functions:
            self.functions[function.key] = function
            self._due[function.key] = None

    def _run(self, key: str) -> None:
        if key in self.trees:
            Frame(self, key, (key,), key, None).run(self.trees[key].body)
            return
        function = self.functions[key]
        frame = Frame(self, function.module, (key, *function.scopes), key, function.owner)
        frame.bind_parameters(function)
        if isinstance(function.node, ast.Lambda):
            self.add(key, "return", frame.value(function.node.body))
        else:
            frame.run(function.node.body)

    def add(self, scope: str, name: str, values: Values) -> None:
        known = self._values.get((scope, name), NOTHING)
        is_full = sum(value.kind == "text" for value in known) >= _MOST_TEXTS
        new = {value for value in values - known if value.kind != "text" or not is_full}
        if new or (scope, name) not in self._values:
            self._values[scope, name] = known | new
            self._due |= dict.fromkeys(self._readers[scope, name])

    def get(self, scope: str, name: str) -> Values:
        self._readers[scope, name].add(self._running)
        return self._values.get((scope, name), NOTHING)

    def lookup(self, scopes: Sequence[str], name: str) -> Values:
        """The variable ``name`` of the innermost scope that has one."""
        if name == "trt":
            return one("module")
        for scope in scopes:
            self._readers[scope, name].add(self._running)
            if (scope, name) in self._values:
                return self._values[scope, name]
        return NOTHING

    def _find_bases(self) -> dict[str, list[Value]]:
        found = {}
        for key, cls in self.classes.items():
            frame = Frame(self, cls.scopes[-1], cls.scopes, key, None)
            found[key] = sorted(frozenset().union(*map(frame.value, cls.node.bases)), key=str)
        return found

    @cached_property
    def lineages(self) -> dict[str, list[str]]:
        """Of every class of ours: itself, those that it is made of, and those that are made of it."""
        above = {key: list(self._above(key)) for key in self.bases}
        return {key: [*keys, *(other for other in above if key in above[other][1:])] for key, keys in above.items()}

    def _above(self, key: str) -> Iterator[str]:
        yield key
        for base in self.bases.get(key, []):
            if base.kind == "our class":
                yield from self._above(base.name)

    def lineage(self, key: str) -> list[str]:
        return self.lineages.get(key, [key])

    def trt_bases(self, key: str) -> set[str]:
        found = (base for each in self.lineage(key) for base in self.bases.get(each, []))
        return {base.name for base in found if base.kind == "class"}

    def method(self, key: str, name: str) -> Function | None:
        found = (self.functions.get(f"{each}.{name}") for each in self.lineage(key))
        return next((function for function in found if function), None)

    def is_guarded(self, use: Use) -> bool:
        return use.is_guarded or self._is_reached_guarded(use.function, frozenset())

    def _is_reached_guarded(self, function: str, seen: frozenset[str]) -> bool:
        """All calls of the function, or of the class of the method, are guarded or come from guarded functions."""
        owner = function.rpartition(".")[0]
        calls = self.calls.get(function) or self.calls.get(owner)
        if not calls or function in seen:
            return False
        return all(guarded or self._is_reached_guarded(caller, seen | {function}) for caller, guarded in calls)
