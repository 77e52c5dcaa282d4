"""What one command does: build the study, run it, write and show what came out."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.study import run_study
from pagedsim.core import ConfigError


def run_experiment(config: DictConfig) -> None:
    """Run `config.study`; everything that it leaves is in Hydra's output folder."""
    hydra = HydraConfig.get()
    folder = _writable(Path(hydra.runtime.output_dir))
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    plan = instantiate(config.study, _convert_="all")
    study = run_study(plan, config, list(hydra.overrides.task), folder)
    for what, why in study.failed.items():
        print(f"pagedsim: {what}: {why}", file=sys.stderr)
    if not study.runs:
        raise ConfigError("no run was completed")


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"hydra.run.dir={folder}: cannot be written: {error.strerror}") from error
    return folder
