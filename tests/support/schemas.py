"""JSON schemas with an instance of each, and regular expressions with a text that each matches."""

import json
from typing import Any


def instance_text(instance: Any) -> str:
    """An instance as a constrained model writes it."""
    return json.dumps(instance, ensure_ascii=False)


def record(**properties: Any) -> dict[str, Any]:
    """A closed object, all of whose properties are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": name} for name in ("string", "integer", "number", "boolean", "null"))
SHORT = {"type": "string", "maxLength": 12}
COLOUR = {"enum": ["red", "green", "blue"]}
POINT = record(x={"type": "integer", "minimum": -9, "maximum": 9}, y={"type": "integer", "minimum": -9, "maximum": 9})
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": record(
            value={"type": "integer", "minimum": 0, "maximum": 9}, children=array({"$ref": "#/$defs/node"}, maxItems=2)
        )
    },
}
LINKED = {
    "$ref": "#/$defs/link",
    "$defs": {
        "link": {
            "type": "object",
            "properties": {"id": COLOUR, "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}},
            "required": ["id", "next"],
            "additionalProperties": False,
        }
    },
}
EVENT = record(
    title=SHORT,
    date={"type": "string", "format": "date"},
    participants=array({"enum": ["Alice", "Bob", "Carol"]}, minItems=1, maxItems=3),
)
ORDER = record(
    id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    lines=array(
        record(
            sku={"type": "string", "pattern": "^[a-z]{3,5}$"}, count={"type": "integer", "minimum": 1, "maximum": 20}
        ),
        minItems=1,
        maxItems=3,
    ),
    paid=BOOLEAN,
)

SCHEMAS: list[tuple[str, dict[str, Any], Any]] = [
    ("one short string", record(name=SHORT), {"name": "Ada"}),
    (
        "a name and an age",
        record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 130}),
        {"name": "Ada", "age": 36},
    ),
    ("an event", EVENT, {"title": "Lunch", "date": "2026-11-30", "participants": ["Alice", "Bob"]}),
    ("an order", ORDER, {"id": "AB-1234", "lines": [{"sku": "abc", "count": 2}], "paid": True}),
    ("a tree", TREE, {"value": 1, "children": [{"value": 2, "children": []}]}),
    ("a linked list", LINKED, {"id": "red", "next": {"id": "blue", "next": None}}),
    ("any object", {"type": "object"}, {"a": [1, 2.5, None, True, {"b": "c"}]}),
    ("free text", record(text=STRING), {"text": "The quick brown fox jumps over the lazy dog, 42 times."}),
    ("an enum", COLOUR, "green"),
    (
        "a constant",
        record(kind={"const": "circle"}, radius={"type": "number", "minimum": 0, "maximum": 10}),
        {"kind": "circle", "radius": 2.5},
    ),
    (
        "an array of numbers",
        array({"type": "number", "minimum": 0, "maximum": 1}, minItems=2, maxItems=4),
        [0.5, 0.25, 1],
    ),
    ("an array of points", array(POINT, minItems=1, maxItems=3), [{"x": 1, "y": -2}]),
    (
        "optional properties",
        {"type": "object", "properties": {"a": BOOLEAN, "b": BOOLEAN, "c": BOOLEAN}, "additionalProperties": False},
        {"a": True, "c": False},
    ),
    ("alternatives", {"anyOf": [record(ok=BOOLEAN), record(error=SHORT)]}, {"error": "none"}),
    (
        "one of disjoint kinds",
        {"oneOf": [record(kind={"const": "a"}, a=BOOLEAN), record(kind={"const": "b"}, b=BOOLEAN)]},
        {"kind": "b", "b": True},
    ),
    (
        "a map",
        {
            "type": "object",
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxProperties": 3,
        },
        {"a": 1, "b": 22},
    ),
    (
        "a tuple",
        {"type": "array", "prefixItems": [SHORT, INTEGER, BOOLEAN], "items": False, "minItems": 3, "maxItems": 3},
        ["a", 1, True],
    ),
    (
        "an e-mail address",
        record(email={"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$"}),
        {"email": "ada@host.org"},
    ),
    ("a uuid", record(id={"type": "string", "format": "uuid"}), {"id": "123e4567-e89b-12d3-a456-426614174000"}),
    (
        "forty properties",
        record(**{f"field_{i}": {"type": "integer", "minimum": 0, "maximum": 9} for i in range(40)}),
        {f"field_{i}": i % 10 for i in range(40)},
    ),
]

REGEXES: list[tuple[str, str]] = [
    (r"[0-9]{3}-[0-9]{4}", "555-0123"),
    (r"(yes|no|maybe)( indeed)?", "maybe indeed"),
    (r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", "2026-11-30T07:55:30Z"),
    (r"([A-Z][a-z]{2,8} ){2,4}end", "Some Nice Words end"),
    (r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}", "192.168.0.254"),
    (r"\p{Lu}\p{Ll}+ \p{Nd}+", "Zürich 8001"),
    (r"(a|b)*abb", "abababb"),
    (r"[^\n]{1,80}\n", "One line of at most eighty characters.\n"),
]

FURTHER: list[dict[str, Any]] = [
    record(a=BOOLEAN, b=NULL),
    record(score={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}),
    record(even={"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 2}),
    record(above={"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13}),
    record(code={"type": "string", "minLength": 3, "maxLength": 3}),
    record(hex={"type": "string", "pattern": "^#[0-9a-f]{6}$"}),
    record(day={"type": "string", "format": "date"}),
    record(at={"type": "string", "format": "date-time"}),
    record(hour={"type": "string", "format": "time"}),
    record(host={"type": "string", "format": "ipv4"}),
    record(id={"type": "string", "format": "uuid"}),
    record(maybe={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    record(either={"type": ["boolean", "null"]}),
    record(mixed={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, COLOUR, NULL]}),
    record(which={"enum": [1, "two", None, True, [3], {"four": 4}]}),
    record(constant={"const": {"fixed": [1, 2]}}),
    record(empty={"type": "object", "additionalProperties": False}),
    record(nothing={"type": "array", "maxItems": 0}),
    record(pair=array(BOOLEAN, minItems=2, maxItems=2)),
    record(grid=array(array(BOOLEAN, minItems=2, maxItems=2), minItems=2, maxItems=2)),
    record(words=array(COLOUR, minItems=1, maxItems=5)),
    record(nested=record(nested=record(nested=record(leaf=BOOLEAN)))),
    record(**{"a key with spaces": BOOLEAN, 'a "quoted" key': BOOLEAN, "ключ": BOOLEAN, "": BOOLEAN}),
    record(**dict.fromkeys("abcdefghijkl", BOOLEAN)),
    {"type": "object", "properties": {"a": BOOLEAN, "b": COLOUR}, "required": ["b"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": BOOLEAN},
        "required": ["a"],
        "additionalProperties": COLOUR,
        "maxProperties": 3,
    },
    {"type": "object", "patternProperties": {"^x-[a-c]$": BOOLEAN}, "additionalProperties": False, "maxProperties": 2},
    {"type": "object", "additionalProperties": BOOLEAN, "minProperties": 1, "maxProperties": 2},
    {"allOf": [record(a=BOOLEAN), {"properties": {"a": {"const": True}}}]},
    {"anyOf": [array(BOOLEAN, maxItems=3), record(a=BOOLEAN), {"type": "integer", "minimum": 0, "maximum": 9}]},
    {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 99}]},
    {"$defs": {"point": POINT}, **record(a={"$ref": "#/$defs/point"}, b={"$ref": "#/$defs/point"})},
    {"definitions": {"c": COLOUR}, **record(a={"$ref": "#/definitions/c"})},
    {"type": "array", "prefixItems": [BOOLEAN, COLOUR], "items": NULL, "minItems": 2, "maxItems": 3},
    array({"anyOf": [COLOUR, BOOLEAN]}, minItems=3, maxItems=3),
    array(record(a=COLOUR), minItems=2, maxItems=2),
    {"type": "string", "maxLength": 10},
    {"type": "string", "pattern": "^(yes|no)$"},
    {"type": "string", "pattern": "[0-9]{2}", "maxLength": 6},
    {"type": "integer", "minimum": -3, "maximum": 3},
    {"type": "number", "minimum": 0, "maximum": 0.5},
    {"enum": ["on", "off", 0, 1]},
    {"title": "Described", "description": "With words.", "default": True, "examples": [False], "type": "boolean"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", **record(a=BOOLEAN)},
]
"""More shapes, all of them short: a sampled answer comes to its end within some dozens of tokens."""
