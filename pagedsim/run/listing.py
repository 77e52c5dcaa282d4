"""Every experiment there is: what it asks, which backends serve it, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from inspect import isclass
from typing import Any, cast, get_type_hints

from omegaconf import OmegaConf

from pagedsim.core import ConfigError
from pagedsim.run.objects import locate
from pagedsim.run.study import Study


@dataclass(frozen=True)
class Experiment:
    """One option of the group `experiment`."""

    name: str
    title: str
    kind: type[Study]

    @property
    def backends(self) -> Sequence[str]:
        """Those that can serve it."""
        return self.kind.backends

    @property
    def why(self) -> str:
        """Why no other; empty where every backend can."""
        return self.kind.why if len(self.backends) == 1 else ""

    @property
    def runs(self) -> bool:
        """Whether it has anything run, rather than reading or working out."""
        return self.kind.asks

    @property
    def keeps_tables(self) -> bool:
        """Whether it leaves tables of its runs, and a timeline."""
        return self.runs and self.kind.keeps_tables


def experiments() -> list[Experiment]:
    """All of them, by name, from conf/experiment."""
    paths = [path for path in _folder().iterdir() if path.name.endswith(".yaml")]
    return [_experiment(path) for path in sorted(paths, key=lambda path: path.name)]


def _experiment(path: Traversable) -> Experiment:
    config: Any = OmegaConf.create(path.read_text(encoding="utf-8"))
    study: Any = config.study
    return Experiment(
        path.name.removesuffix(".yaml"), str(study.get("title", "")), _kind(str(study._target_))
    )


def _kind(target: str) -> type[Study]:
    """The class of what a target makes, which may be a function."""
    found = locate(target)
    kind: Any = found if isclass(found) else get_type_hints(found)["return"]
    if not issubclass(kind, Study):
        raise ConfigError(f"study._target_={target}: must make a Study")
    return cast(type[Study], kind)


def _folder() -> Traversable:
    return files("conf") / "experiment"
