"""What one command does: build the study, run it, write and show what came out."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.study import run_study
from pagedsim.core import ConfigError, PagedsimError
from pagedsim.metrics.study import Study
from pagedsim.report import show, write
from pagedsim.tracking import check_mode, track


def run_experiment(config: DictConfig) -> None:
    """Run `config.study`; everything that it leaves is in Hydra's output folder."""
    hydra = HydraConfig.get()
    folder = _writable(Path(hydra.runtime.output_dir))
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    plan = instantiate(config.study, _convert_="all")
    check_mode(config.tracking.mode)
    study = run_study(plan, config, list(hydra.overrides.task), folder)
    if not study.runs:
        raise ConfigError(_first(study) or "no run was completed")
    show(study)
    report = write(study) if config.report else None
    tracked = track(study, config.tracking.mode, project=config.tracking.project)
    _say_where(folder, report, len(tracked))
    if study.failed:
        raise PagedsimError(f"{len(study.failed)} of the runs failed; {_first(study)}")


def _first(study: Study) -> str:
    """What failed first, and how."""
    return next((f"{what}: {why}" for what, why in study.failed.items()), "")


def _say_where(folder: Path, report: Path | None, tracked: int) -> None:
    """Where to look."""
    here = Path.cwd()

    def shown(path: Path) -> str:
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    print(f"results   {shown(folder)}")
    if report is not None:
        print(f"report    {shown(report)}")
        print(f"timeline  {shown(folder / 'timeline.json')}  (open it at ui.perfetto.dev)")
    if tracked:
        print(f"tracking  {shown(folder / 'wandb')}  ({tracked} runs; `wandb sync` uploads them)")


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"hydra.run.dir={folder}: cannot be written: {error.strerror}") from error
    return folder
