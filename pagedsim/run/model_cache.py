"""The model that was served last, kept for the next run: to load one may take longer than a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedsim.core import ConfigError
from pagedsim.run.machine import give_back

if TYPE_CHECKING:
    from pagedsim.engine.arguments import Arguments
    from pagedsim.engine.models import LoadedModel


class ModelCache:
    """Loads models, and keeps one; of one that cannot be loaded it keeps why."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._kept: LoadedModel | ConfigError | None = None

    def model(self, arguments: Arguments) -> LoadedModel:
        """What these arguments load; raises ConfigError where they cannot."""
        from pagedsim.engine.assemble import loaded

        where = arguments.device, arguments.server.tensor_parallel
        key = (_named(arguments.model), *where, *arguments.loading.values())
        if key != self._key or self._gone():
            self._drop()  # first, since there may be no room for two
            try:
                self._kept = loaded(arguments)
            except ConfigError as error:
                self._kept = error
            self._key = key
        if isinstance(self._kept, ConfigError):
            raise self._kept
        assert self._kept is not None
        return self._kept

    def _gone(self) -> bool:
        """Whether it was shared by several processes, of which one has failed."""
        ranks = getattr(self._kept, "ranks", None)
        return ranks is not None and ranks.gone

    def _drop(self) -> None:
        if (ranks := getattr(self._kept, "ranks", None)) is not None:
            ranks.close()
        self._key = self._kept = None
        give_back()


def _named(model: Any) -> str:
    """A model's name; of a configuration all that is in it."""
    return model.to_json_string() if hasattr(model, "to_json_string") else str(model)
