"""Build the backend that a server's configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedsim.backends.engine import Serving
from pagedsim.backends.sim import Simulation
from pagedsim.core import ConfigError, Policy, PolicyWrapper
from pagedsim.core.errors import not_installed, require_number, require_whole, shown
from pagedsim.engine.output import Observer, Tokenizer
from pagedsim.serve.realtime_sim import RealtimeSimulator
from pagedsim.serve.worker import Engine
from pagedsim.spec.roots import Serve
from pagedsim.spec.run import RunSpec

OF_THE_SIMULATOR = ("speed", "answer_tokens", "tokenizer")


@dataclass(frozen=True)
class ServedModel:
    """A backend with the names that clients see."""

    engine: Engine
    backend: str
    model: str

    @property
    def policy(self) -> str:
        """The name of its policy's class."""
        return type(self.engine.scheduler.policy).__name__


def build_model(
    config: Mapping[str, Any],
    observer: Observer | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ServedModel:
    """Build the backend of a configuration; raises ConfigError if it is invalid.

    `say` is called before slow operations, such as loading a model.
    """
    require_number("speed", config["speed"], above=0)
    require_whole("answer_tokens", config["answer_tokens"], 1)
    if config["name"] == "":
        raise ConfigError("name='': must not be empty; null is the model's own")
    run_config = RunSpec(dict(config), config["seed"])
    stage = run_config.prepare()
    for policy in stage.policies:
        _refuse_unpredicted(policy)
    if isinstance(stage, Simulation):
        engine: Engine = RealtimeSimulator(
            stage.scheduler,
            stage.cost,
            observer=observer,
            speed=config["speed"],
            answer_tokens=config["answer_tokens"],
            tokenizer=tokenizer_of(config["tokenizer"]),
            way=stage.cost.server_seconds,
            **stage.settings,
        )
        return ServedModel(engine, "sim", config["name"] or stage.replica.model.name)
    if isinstance(stage, Serving):
        for name in OF_THE_SIMULATOR:
            if config[name] != getattr(Serve, name):
                raise ConfigError(f"{name}={shown(config[name])}: is a setting of backend=sim")
        say(f"loading {client_name(stage.name)}")
        from pagedsim.engine.engine import LLMEngine

        engine = LLMEngine(stage.arguments, observer=observer)
        return ServedModel(engine, "engine", config["name"] or client_name(stage.name))
    raise ConfigError(f"backend={type(stage).__name__}: serve takes sim and engine")


def client_name(model: str) -> str:
    """The name of a model for clients: the base name of a file or folder, not its path."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _refuse_unpredicted(policy: Policy) -> None:
    """Refuse policies that need predicted lengths; deadlines and clients come with requests."""
    if "predictor" in policy.needs:
        name = type(policy).__name__
        raise ConfigError(f"policy: {name} goes by predicted lengths, and clients predict none")
    if isinstance(policy, PolicyWrapper):
        _refuse_unpredicted(policy.inner)


def tokenizer_of(where: str | None) -> Tokenizer | None:
    """The tokenizer of a folder; raises ConfigError if there is none in it."""
    if where is None:
        return None
    if not Path(where).expanduser().is_dir():
        raise ConfigError(f"tokenizer={where}: must be a folder with a tokenizer's files")
    try:
        from pagedsim.engine.tokenizer import load_tokenizer
    except ModuleNotFoundError as error:
        raise not_installed(f"tokenizer={where}", "engine", error.name) from error
    tokenizer = load_tokenizer(Path(where).expanduser())
    if tokenizer is None:
        raise ConfigError(f"tokenizer={where}: has no tokenizer's files")
    return tokenizer
