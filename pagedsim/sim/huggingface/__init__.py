"""Read model shapes from Hugging Face's config.json, whose keys differ between families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.sim.huggingface.family import FAMILIES
from pagedsim.sim.huggingface.keys import Keys
from pagedsim.sim.huggingface.quantization import products, weight_bytes
from pagedsim.sim.model import ModelShape

__all__ = ["read_shape"]


def read_shape(
    config: str | PathLike[str] | Mapping[str, Any], name: str | None = None
) -> ModelShape:
    """The shape described by a Hugging Face config.json, given as path, folder or content."""
    keys = _text(_load(config))
    if "model_type" not in keys.values:
        raise ConfigError(f"{keys.where}: has no model_type")
    family = str(keys.values["model_type"])
    if family not in FAMILIES:
        raise unknown(f"model_type in {keys.where}:", family, FAMILIES)
    try:
        shape = FAMILIES[family].shape(keys)
        _refuse_projected_embeddings(keys, shape["hidden"])
        shape |= {"dtype_bytes": weight_bytes(keys), "products": products(keys)}
        return ModelShape(name=name or _name(keys), **shape)
    except ConfigError as error:
        if str(error).startswith(keys.where):
            raise
        raise ConfigError(f"{keys.where}: {error}") from error


def _load(config: str | PathLike[str] | Mapping[str, Any]) -> Keys:
    if isinstance(config, Mapping):
        return Keys(config, "config.json")
    if not isinstance(config, str | PathLike):
        raise ConfigError(f"config={config!r}: must be the path of a config.json or its folder")
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold an object, not a {type(values).__name__}")
    return Keys(values, str(path))


def _text(keys: Keys) -> Keys:
    """The language model of a multimodal config; its other parts are not counted."""
    if "text_config" not in keys.values:
        return keys
    around = ("tie_word_embeddings", "quantization_config", "_name_or_path")
    outer = {key: keys.values[key] for key in around if key in keys.values}
    return Keys(keys.part("text_config").values, keys.where).over(outer)


def _refuse_projected_embeddings(keys: Keys, hidden: int) -> None:
    """Raise ConfigError for projected embeddings (OPT-350M), which `ModelShape` cannot express."""
    if keys.whole("word_embed_proj_dim", default=hidden) != hidden:
        raise ConfigError(
            f"{keys.where}: word_embed_proj_dim differs from hidden_size={hidden}: "
            "such a model cannot be served here"
        )


def _name(keys: Keys) -> str:
    given = keys.values.get("_name_or_path") or Path(keys.where).resolve().parent.name
    return str(given).rstrip("/").rpartition("/")[2].lower()
