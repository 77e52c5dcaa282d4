"""Modules with weights: read from files, made at random, or the tiny model's own."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pagedsim.core.errors import ConfigError
from pagedsim.engine.models import tiny
from pagedsim.engine.models.reading import brief, check_complete, read_module
from pagedsim.engine.models.source import check_weights, folder_of, not_on_hub

log = logging.getLogger(__name__)


def skeleton(config: Any) -> Any:
    """The model without data: nothing is read, no memory taken."""
    with torch.device("meta"):
        # transformers writes the data type that it is given into the configuration.
        return _from_config(copy.deepcopy(config), torch.float32)


def random(config: Any, dtype: torch.dtype | None, device: torch.device, seed: int) -> Any:
    """The model with random weights, made on the device; the same seed makes the same ones."""
    with _seeded(device, seed), device:
        return _from_config(config, dtype or dtype_of(config) or torch.float32)


def tiny_model(dtype: torch.dtype | None) -> Any:
    """The model called "tiny", on the CPU."""
    cpu = torch.device("cpu")
    with _seeded(cpu, 0), cpu:
        module = _from_config(tiny.tiny_config(), dtype or torch.float32)
    tiny.fill(module)
    return module


def stored(model: str | os.PathLike[str], config: Any, dtype: torch.dtype | None) -> Any:
    """The model with the weights of a folder or of the hub, on the CPU; raises ConfigError."""
    check_weights(model)
    folder = folder_of(model)
    try:
        module, report = read_module(
            os.fspath(folder or model), config=config, dtype=dtype or dtype_of(config) or "auto"
        )
    except Exception as error:  # transformers and safetensors raise what comes
        if folder is None:
            raise not_on_hub(model, error) from error
        raise ConfigError(f"model={model}: its weights cannot be loaded: {brief(error)}") from error
    check_complete(os.fspath(model), report)
    if unused := sorted(report["unexpected_keys"]):
        log.warning("model=%s: %d weights are not used, such as %s", model, len(unused), unused[0])
    return module


def _from_config(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def dtype_of(config: Any) -> torch.dtype | None:
    """The data type that a configuration states, where it states one."""
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return stated if isinstance(stated, torch.dtype) else None


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Within, torch's generators start from `seed`; after, they are as before."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
