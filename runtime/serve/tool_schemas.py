"""The functions that a request offers, and the JSON arguments of a call by their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
_LITERALS = {"True": True, "False": False, "None": None}
"""How models that have read much Python spell what JSON spells in lower case."""
_MAX_DEPTH = 16


class ToolSchemas:
    """``parameters`` by the name of the function: a JSON schema of type object, or an empty one."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self._parameters = dict(parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def arguments(self, name: str, values: Mapping[str, str]) -> str:
        """The arguments of a call as the text of a JSON object.

        The model writes strings as they are and everything else as JSON, so the schema decides what a value is. One
        that its schema does not allow is passed on as a string: whoever validates it has the model's own words.
        """
        root = self._parameters[name]
        properties = root.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        typed = {key: _typed(text, schemas.get(key), root) for key, text in values.items()}
        return json.dumps(typed, ensure_ascii=False)


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    types = _types(schema, root, _MAX_DEPTH)
    if not types or (types == {"string"}):
        return text
    try:
        value = _LITERALS[text.strip()] if text.strip() in _LITERALS else json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # neither NaN, infinite nor a lone surrogate
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
        value = int(value)
    # What may be a string as well is one, unless it says null, true or false, or is an object or an array.
    if "string" in types and isinstance(value, int | float | str) and not isinstance(value, bool):
        return text
    return value if any(_is_of_type(value, name) for name in types) else text


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _JSON_TYPES.get(name, ()))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """The JSON types that a schema names, through local references and alternatives; empty if it names none."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    values = [*schema["enum"]] if isinstance(schema.get("enum"), list) else []
    values += [schema["const"]] if "const" in schema else []
    found = {name for value in values for name in _JSON_TYPES if _is_of_type(value, name)}
    found |= {name for keyword, name in (("properties", "object"), ("items", "array")) if keyword in schema}
    for keyword in ("anyOf", "oneOf", "allOf"):
        for part in schema[keyword] if isinstance(schema.get(keyword), list) else ():
            found |= _types(part, root, depth - 1)
    return found


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside the schema (``#/$defs/Name``) points at, or None."""
    place: Any = root
    if not reference.startswith("#"):
        return None
    for key in reference.removeprefix("#").split("/")[1:]:
        place = place.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
