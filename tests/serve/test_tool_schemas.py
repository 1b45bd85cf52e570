from __future__ import annotations

import json
from typing import Any

import pytest

from qwen4exp_trt.runtime.serve.tool_schemas import ToolSchemas

NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, ' "a"\n{', ' "a"\n{'),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "object"}, '{"a": {"b": "ü"}}', {"a": {"b": "ü"}}),
        ({"type": "object"}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ({"properties": {}}, "{}", {}),
        ({"items": {}}, "[]", []),
        ({"type": "null"}, "null", None),
        (NULLABLE, "None", None),
        (NULLABLE, "7", 7),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"type": ["string", "integer"]}, "7", "7"),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/Count"}, "3", 3),
        ({"$ref": "#/$defs/Loop"}, "3", "3"),
        ({"$ref": "#/$defs/a~1b"}, "3", 3),
        ({"$ref": "https://example.org/schema"}, "3", "3"),
        ({}, "3", "3"),
        (True, "3", "3"),
        ({"type": 7, "anyOf": 7, "enum": 7}, "3", "3"),
    ],
)
def test_a_value_has_the_type_that_its_schema_names(schema: Any, text: str, expected: Any) -> None:
    definitions = {"Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": {"type": "integer"}}
    tools = ToolSchemas({"f": {"type": "object", "properties": {"x": schema}, "$defs": definitions}})
    arguments = json.loads(tools.arguments("f", {"x": text}))
    assert arguments == {"x": expected}
    assert type(arguments["x"]) is type(expected)


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": {"y": {"type": "integer"}}}])
def test_a_parameter_without_schema_is_a_string(parameters: Any) -> None:
    assert ToolSchemas({"f": parameters}).arguments("f", {"x": "1", "ü": "ü"}) == '{"x": "1", "ü": "ü"}'
