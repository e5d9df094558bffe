"""Schemas that recur, with an end and without."""

import json
from typing import Any

import pytest

from slipstream.engine.finite_schema import has_finite_document

ITSELF = {"$ref": "#"}
NEEDS_ITSELF = {"type": "object", "properties": {"next": ITSELF}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "integer"},
        {"type": "array", "items": ITSELF},
        {"type": "object", "properties": {"next": ITSELF}},
        {"type": "object", "properties": {"next": ITSELF}, "required": ["name"]},
        {"anyOf": [ITSELF, {"type": "integer"}]},
        {"oneOf": [{"type": "null"}, NEEDS_ITSELF]},
        {"type": ["object", "null"], "properties": {"a": ITSELF}, "required": ["a"]},
        {**NEEDS_ITSELF, "enum": [{"next": 1}]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"type": "array", "minItems": 1, "prefixItems": [{}], "items": ITSELF},
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"left": {"$ref": "#/$defs/branch"}},
                    "required": ["left"],
                },
                "branch": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
            },
        },
    ],
)
def test_an_end_is_found(schema: Any) -> None:
    assert has_finite_document(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        ITSELF,
        NEEDS_ITSELF,
        {"allOf": [{"type": "object"}, ITSELF]},
        {"anyOf": [ITSELF, NEEDS_ITSELF]},
        {"type": "array", "items": ITSELF, "minItems": 1},
        {"type": "array", "prefixItems": [{}], "items": ITSELF, "minItems": 2},
        {"type": "object", "additionalProperties": ITSELF, "required": ["any"]},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
        },
    ],
)
def test_no_end_is_found(schema: Any) -> None:
    assert not has_finite_document(json.dumps(schema))
