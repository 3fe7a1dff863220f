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
