"""JSON files; depends on the standard library alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any], ordered: bool = False) -> None:
    """Write with sorted keys unless `ordered`, and with null for NaN, which JSON lacks."""
    text = json.dumps(_without_nan(content), indent=2, sort_keys=not ordered, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_json`, with NaN for null."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return _with_nan(content)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_nan(inner) for inner in value]
    return math.nan if value is None else value
