"""`python -m pagedsim serve`: from a configuration to a server that listens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pagedsim.core import ConfigError


def completed(words: Sequence[str]) -> list[str]:
    """The words of the command line; an engine that is given no model serves the tiny one."""
    if several := {"-m", "--multirun"} & set(words):
        raise ConfigError(f"{several.pop()}: a command is one server; start one for each")
    keys = [word.partition("=")[0] for word in words]
    engine = "backend=engine" in words and not {"model", "backend.model"} & set(keys)
    return ["model=tiny"] * engine + list(words)


def serve(config: DictConfig) -> None:
    """Serve until told to end."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    for missing in sorted(OmegaConf.missing_keys(config)):
        raise ConfigError(f"{missing}: must be given: {missing}=...")
    try:
        from pagedsim.serve.listen import listen
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve: needs {error.name}, which is not installed: "
            "pip install -c constraints.txt -e '.[serve]'"
        ) from error
    listen(settings)
