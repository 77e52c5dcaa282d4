"""A job of Hydra's: the study that its words describe, alone or as one of a sweep."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from pagedsim.core.errors import require_flag
from pagedsim.options import Options
from pagedsim.run.compose import ROOT
from pagedsim.run.folder import claimed
from pagedsim.run.multirun import record_job
from pagedsim.run.runner import Execution, begun


def run_experiment() -> None:
    """Run the study; everything that it leaves is in Hydra's output folder.

    As one job of several it prints nothing: its result or its error is kept for the end.
    """
    hydra = HydraConfig.get()
    require_flag("hydra.verbose", hydra.verbose)
    folder = Path(hydra.runtime.output_dir)
    # As typed: what ${...} names is looked up where the words are composed, and in each arm.
    words = cast(list[str], OmegaConf.to_container(hydra.overrides.task))
    root = str(hydra.job.config_name or ROOT)
    options = _options()
    if hydra.mode != RunMode.MULTIRUN:
        own = any(one.startswith("hydra.run.dir=") for one in hydra.overrides.hydra)
        with claimed(folder, own) as folder:
            begun(words, folder, options, root).execute()
        return
    life: Execution | None = None
    error: Exception | None = None
    try:
        with claimed(folder, own=True):
            life = begun(words, folder, options, root, quiet=True)
            life.execute()
    except Exception as other:
        error = other
    record_job(folder, words, life.published if life else None, error)


def _options() -> Options:
    """The options in the folders that Hydra composes of: --config-dir and hydra.searchpath add to
    them."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    places = [source.full_path() for source in sources]
    folders: list[Traversable] = []
    for path in [*places, *HydraConfig.get().searchpath]:
        kind, _, place = path.partition("://")
        if kind == "file":
            folders.append(Path(place))
        elif kind == "pkg" and place != "hydra.conf":
            folders.append(files(place))
    return Options(folders)
