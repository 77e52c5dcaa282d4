"""What several tests of experiments need; each says which with `pytestmark`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
from hydra import initialize_config_module
from omegaconf import OmegaConf

from experiments import serving
from experiments.keeper import Keeper
from pagedsim.config import register

if TYPE_CHECKING:
    from pagedsim.engine.models import LoadedModel


@pytest.fixture
def hydra() -> Iterator[None]:
    """Configurations can be composed."""
    register()
    OmegaConf.register_new_resolver("manual", lambda: "", replace=True)
    with initialize_config_module("conf", version_base="1.3"):
        yield


@pytest.fixture
def a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines share one small model and wait for no machine: no time matters to these tests."""
    from pagedsim.engine import assemble

    def load(*_: object, max_model_len: int | None = None, **__: object) -> LoadedModel:
        return replace(_small(), max_model_len=max_model_len or _small().max_model_len)

    monkeypatch.setattr(assemble, "load_model", load)
    monkeypatch.setattr(serving, "KEPT", Keeper())
    monkeypatch.setattr(serving, "the_machine", nullcontext)


@cache
def _small() -> LoadedModel:
    from pagedsim.engine.models import load_model
    from tests.engine.architectures import made

    return load_model(made("llama"))
