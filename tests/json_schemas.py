"""JSON schemas of every kind that people ask for: nesting, arrays, enums, patterns, references."""

from typing import Any

Schema = dict[str, Any]
WORD: Schema = {"type": "string", "pattern": "^[a-z]{2,8}$"}
SHORT: Schema = {"type": "string", "maxLength": 12}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
DATE: Schema = {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]$"}
LEVEL: Schema = {"enum": ["low", "medium", "high"]}


def closed(**properties: Schema) -> Schema:
    """An object with exactly these members."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def several(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


POINT = closed(x=SMALL, y=SMALL)
SCHEMAS: list[Schema] = [
    closed(name=SHORT, age=SMALL),
    closed(name=WORD, level=LEVEL, done={"type": "boolean"}),
    closed(points=several(POINT, 3, 1)),
    closed(outer=closed(middle=closed(inner=closed(value=SMALL)))),
    several(closed(key=WORD, value=SHORT), 3, 1),
    several(LEVEL, 5, 2),
    closed(born=DATE, died={"anyOf": [DATE, {"type": "null"}]}),
    closed(matrix=several(several(SMALL, 3, 1), 3, 1)),
    {**closed(title=SHORT, notes=several(WORD, 3)), "required": ["title"]},
    closed(shape={"anyOf": [closed(kind={"const": "dot"}, at=POINT), closed(radius=SMALL)]}),
    closed(email={"type": "string", "pattern": "^[a-z]{1,6}@[a-z]{1,6}\\.(org|net)$"}),
    closed(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, price=SMALL),
    {
        "type": "object",
        "patternProperties": {"^[a-z]{1,6}$": SMALL},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    closed(user=closed(id=SMALL, roles=several({"enum": ["admin", "user"]}, 2, 1)), active=LEVEL),
    closed(tree={"$ref": "#/$defs/node"})
    | {"$defs": {"node": closed(leaf=SMALL, next={"anyOf": [{"type": "null"}, POINT]})}},
    closed(text={"type": "string", "minLength": 3, "maxLength": 10}, rank={"enum": [1, 2, 3]}),
    closed(version={"type": "string", "pattern": "^[0-9]{1,2}(\\.[0-9]{1,2}){2}$"}, yes=LEVEL),
    several({"anyOf": [SMALL, {"type": "boolean"}, {"type": "null"}, WORD]}, 4, 1),
    closed(tool={"enum": ["search", "open"]}, arguments=closed(query=SHORT, limit=SMALL)),
    closed(colour={"type": "string", "pattern": "^#[0-9a-f]{6}$"}, tags=several(WORD, 2)),
]
