"""A study loads its model once, not once a run."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.run.serving import ModelCache

torch = pytest.importorskip("torch")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was loaded."""
    from pagedsim.engine import assemble

    seen: list[Any] = []

    def load(model: Any, **settings: Any) -> Any:
        seen.append(settings["seed"])
        if settings["seed"] == 99:
            raise ConfigError("nowhere to be found")
        return object()

    monkeypatch.setattr(assemble, "load_model", load)
    return seen


def arguments(model: Any = "tiny", **settings: Any) -> Any:
    from pagedsim.engine.arguments import Arguments

    return Arguments.of(model=model, device="cpu", **settings)


def test_a_model_is_loaded_once_while_it_is_the_same(loads: list[Any]) -> None:
    keeper = ModelCache()
    first = keeper.model(arguments(block_size=8))
    assert keeper.model(arguments(block_size=16, policy="priority")) is first
    other = keeper.model(arguments(seed=1))
    assert other is not first
    assert keeper.model(arguments()) not in (first, other)
    assert loads == [0, 1, 0]


def test_configurations_are_told_by_what_is_in_them(loads: list[Any]) -> None:
    from transformers import LlamaConfig

    keeper = ModelCache()
    first = keeper.model(arguments(LlamaConfig(hidden_size=64)))
    assert keeper.model(arguments(LlamaConfig(hidden_size=64))) is first
    assert keeper.model(arguments(LlamaConfig(hidden_size=32))) is not first


def test_what_cannot_be_loaded_is_tried_once(loads: list[Any]) -> None:
    keeper = ModelCache()
    for _ in range(2):
        with pytest.raises(ConfigError, match="nowhere to be found"):
            keeper.model(arguments(seed=99))
    assert loads == [99]


def test_an_engine_takes_a_model_that_is_loaded_already() -> None:
    from pagedsim.engine.engine import LLMEngine
    from pagedsim.engine.models import load_model
    from tests.engine.architectures import made

    model = load_model(made("llama"), max_model_len=64)
    for length in (None, 32):
        engine = LLMEngine(model=model, device="cpu", blocks=8, max_model_len=length)
        assert engine.model.module is model.module
        assert engine.scheduler.max_model_len == (length or 64)
    with pytest.raises(ConfigError, match="max_model_len=65: was loaded for 64"):
        LLMEngine(model=model, device="cpu", blocks=8, max_model_len=65)
