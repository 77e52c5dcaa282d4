"""Calls of transformers with its log silenced, and its errors in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagedsim.core.errors import ConfigError


def read_module(place: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """A causal language model with its weights, and what transformers reports of reading them.

    Raises whatever transformers and safetensors do.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with quiet():
        module, report = auto.from_pretrained(place, output_loading_info=True, **settings)
    return module, report


def check_complete(name: str, report: dict[str, Any]) -> None:
    """Raise ConfigError for weights that are missing: transformers would fill them at random."""
    if missing := sorted(report["missing_keys"]):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"model={name}: its weights lack {missing[0]}{others}")


@contextmanager
def quiet() -> Iterator[None]:
    """Within, transformers and the hub's client log errors only.

    The engine checks for itself what transformers warns of. The client warns of every attempt to
    reach the hub, and raises after the last.
    """
    from transformers.utils import logging as transformers

    hub = logging.getLogger("huggingface_hub")
    verbosity, level = transformers.get_verbosity(), hub.level
    transformers.set_verbosity_error()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.set_verbosity(verbosity)
        hub.setLevel(level)


MOST_SHOWN = 200
"""Characters of an error's text."""


def brief(error: Exception) -> str:
    """An error's text in one line that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"
