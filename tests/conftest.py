"""What tests of several rooms share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagedsim.__main__ import main

if TYPE_CHECKING:
    from pagedsim.engine.models import LoadedModel

# Small models are faster on one thread, and steadier; workers and processes share the cores anyway.
# Set before anybody imports torch, and handed on to every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Run the command in this process, in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def called(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pagedsim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return called


@pytest.fixture
def hydra() -> Iterator[None]:
    """Configurations can be composed."""
    from hydra import initialize_config_module
    from omegaconf import OmegaConf

    from pagedsim.config import register

    register()
    OmegaConf.register_new_resolver("manual", lambda: "", replace=True)
    with initialize_config_module("conf", version_base="1.3"):
        yield


@pytest.fixture
def a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines share one small model and wait for no machine: no time matters to these tests."""
    from pagedsim.engine import assemble
    from pagedsim.run import serving
    from pagedsim.run.model_cache import ModelCache

    def load(*_: object, max_model_len: int | None = None, **__: object) -> LoadedModel:
        return replace(_small(), max_model_len=max_model_len or _small().max_model_len)

    monkeypatch.setattr(assemble, "load_model", load)
    monkeypatch.setattr(serving, "CACHE", ModelCache())
    monkeypatch.setattr(serving, "the_machine", nullcontext)


@cache
def _small() -> LoadedModel:
    from pagedsim.engine.models import load_model
    from tests.engine.architectures import made

    return load_model(made("llama"))
