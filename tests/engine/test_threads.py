"""On how many threads a CPU computes: the same choice for LLM, the server and studies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError
from pagedsim.engine import engine
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.llm import LLM
from pagedsim.engine.runtime import Threads
from pagedsim.run.backend import Backend, RunConfig
from pagedsim.run.serving import Engine


@pytest.fixture(autouse=True)
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch has three, and there is no engine."""
    monkeypatch.setattr(engine, "THREADS", Threads())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("settings", "wanted"), [({}, 1), ({"num_threads": 2}, 2)])
def test_one_thread_unless_others_are_asked_for(settings: dict[str, Any], wanted: int) -> None:
    llm = LLM("tiny", device="cpu", **settings)
    assert torch.get_num_threads() == wanted
    llm.close()
    assert torch.get_num_threads() == 3


def test_the_last_engine_that_is_closed_gives_the_threads_back() -> None:
    first, second = LLMEngine(device="cpu"), LLMEngine(device="cpu")
    first.close()
    first.close()
    assert torch.get_num_threads() == 1
    second.close()
    assert torch.get_num_threads() == 3


def test_an_engine_that_cannot_be_made_leaves_the_threads_alone() -> None:
    with pytest.raises(ConfigError):
        LLMEngine(model="/nonexistent", device="cpu")
    assert torch.get_num_threads() == 3


def test_a_number_that_was_chosen_since_stays() -> None:
    one = LLMEngine(device="cpu")
    torch.set_num_threads(2)
    one.close()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("count", [0, -1, 1.5, "many"])
def test_a_bad_number_is_one_line(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"^num_threads=.*must be a whole number"):
        LLM("tiny", device="cpu", num_threads=count)


def test_the_setting_of_studies_and_of_the_server_is_the_engine_s(
    hydra: None, composed: dict[str, Any]
) -> None:
    backend: Backend = Engine(threads=2)
    stage: Any = backend.prepare(RunConfig(composed))
    assert stage.arguments.num_threads == 2


@pytest.fixture
def composed(hydra: None) -> dict[str, Any]:
    from hydra import compose
    from omegaconf import OmegaConf

    words = ["backend=engine", "model=tiny", "experiment=single"]
    made: Any = OmegaConf.to_container(compose("config", overrides=words), resolve=True)
    return dict(made)
