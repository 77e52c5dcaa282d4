"""What the server's OpenAPI page says of requests and errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}

_REFUSAL = {"description": "An error", "content": {"application/json": {"schema": _ERROR}}}
REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": _REFUSAL, "5XX": _REFUSAL}
"""How every path says no."""


def body(kind: type[BaseModel]) -> dict[str, Any]:
    """The extra of a path that reads its body itself."""
    schema = kind.model_json_schema()
    inside = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, inside)}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, inside: dict[str, Any]) -> Any:
    """A schema that refers to nothing."""
    if isinstance(schema, list):
        return [_inlined(one, inside) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _inlined(inside[name], inside)
    return {key: _inlined(value, inside) for key, value in schema.items()}
