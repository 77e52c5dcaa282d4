"""Where a model's files are, a folder, a GGUF file or the Hugging Face hub, and whether they are
complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pagedsim.core.errors import ConfigError
from pagedsim.engine.models.gguf import is_packed, unpacked
from pagedsim.engine.models.transformers_io import brief, quiet

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def folder_of(model: str | os.PathLike[str]) -> Path | None:
    """The folder that `model` names; None for a name on the hub. Raises ConfigError.

    That of a GGUF file is the one that it was unpacked into (gguf.py).
    """
    if is_packed(model):
        return unpacked(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model={model}: is a file; give the folder that it is in")
    name = os.fspath(model)
    if not name or name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1:
        raise ConfigError(f"model={model}: no such folder")
    return None


def read_config(model: str | os.PathLike[str]) -> Any:
    """transformers' configuration of a folder or of a model on the hub; raises ConfigError."""
    from transformers import AutoConfig

    if (folder := folder_of(model)) is not None:
        _check_json(model, folder / "config.json")
    try:
        with quiet():
            return AutoConfig.from_pretrained(os.fspath(folder or model))
    except Exception as error:  # transformers raises what comes, KeyError included
        if folder is None:
            raise not_on_hub(model, error) from error
        raise ConfigError(f"model={model}: config.json: {brief(error)}") from error


def check_weights(model: str | os.PathLike[str]) -> None:
    """Raise ConfigError where a folder lacks weights or a part of them."""
    folder = folder_of(model)
    if folder is None:
        return
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ConfigError(
            f"model={model}: has no weights ({WEIGHTS[0]} or {WEIGHTS[2]}); "
            "load_format=dummy makes random ones"
        )
    if weights.suffix != ".json":
        return
    try:
        parts = set(json.loads(weights.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"model={model}: {weights.name} is broken: {brief(error)}") from error
    missing = sorted(part for part in parts if not (folder / part).is_file())
    if missing:
        raise ConfigError(
            f"model={model}: {weights.name} names {missing[0]}, which is missing "
            f"({len(missing)} of {len(parts)} parts are)"
        )


def not_on_hub(model: str | os.PathLike[str], error: Exception) -> ConfigError:
    """The error for a name that is neither a folder nor to be had from the hub."""
    return ConfigError(
        f"model={model}: no such folder, and not to be had from the Hugging Face hub: "
        f"{brief(error)}"
    )


def _check_json(model: str | os.PathLike[str], path: Path) -> None:
    """Raise ConfigError unless `path` holds a configuration that names its model type."""
    if not path.is_file():
        raise ConfigError(f"model={model}: the folder has no config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"model={model}: config.json is not JSON: {brief(error)}") from error
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ConfigError(f"model={model}: config.json names no model_type")
    from transformers import CONFIG_MAPPING, __version__

    if (model_type := config["model_type"]) not in CONFIG_MAPPING:  # own code is never run
        raise ConfigError(
            f"model={model}: config.json: model_type {model_type!r} is not known to transformers "
            f"{__version__}"
        )
