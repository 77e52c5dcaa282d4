"""What is refused before anything runs, so that no mistake is found out late."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pagedsim.config import Config, Qoe, Server, Slo
from pagedsim.core import ConfigError
from pagedsim.core.errors import choices, is_number, require_flag, require_whole, unknown
from pagedsim.run.backend import RunConfig
from pagedsim.run.compose import Command, group_of, key_of
from pagedsim.run.job import Arm, Failure, Job, failure_of
from pagedsim.run.objects import flat
from pagedsim.run.parts import build, refuse_fleet
from pagedsim.run.study import Study
from pagedsim.tracking import SETTINGS, check_settings
from pagedsim.workload import Workload

_SECTIONS = {
    "": tuple(field.name for field in fields(Config)),
    "server": tuple(field.name for field in fields(Server)),
    "slo": tuple(field.name for field in fields(Slo)),
    "qoe": tuple(field.name for field in fields(Qoe)),
    "tracking": SETTINGS,
}
"""Sections in which an added key (+server.foo=1) has no reader, and their keys."""
INSIDE = "it asks what happens inside a server"
"""Why a study does not support a server elsewhere."""
_BEYOND = {"ttft": 100.0, "tpot": 5.0, "e2e": 10_000.0}
"""Seconds from which on a bound is more likely meant in milliseconds."""
_NO_ARM = ("study", "tracking", "report", "jobs", "seed", "seeds")
"""Keys that do not tell arms apart."""


def check_base(config: DictConfig) -> None:
    """Raise ConfigError for what is wrong with a study whatever its arms are."""
    require_flag("hydra.verbose", HydraConfig.get().verbose)
    for key in ("seeds", "jobs", "tensor_parallel", "pipeline_parallel", "expert_parallel"):
        if config[key] is not None:
            require_whole(key, config[key], 1)
    require_whole("seed", config.seed, 0)
    if not OmegaConf.is_dict(config.study):
        raise ConfigError("study: must be given; choose an experiment=")
    for key in sorted(OmegaConf.missing_keys(config.study)):
        raise ConfigError(f"{key}: must be given: {key}=...")
    if not OmegaConf.is_dict(config.tracking):
        raise ConfigError("tracking: must be given; choose tracking=none or tracking=wandb")
    _refuse_unknown_scale()
    _refuse_idle(config)
    _refuse_unused_model(config)
    _refuse_added(config)
    tracking = config.tracking
    check_settings(tracking.mode, tracking.get("project", "pagedsim"), tracking.get("entity"))


def _refuse_unknown_scale() -> None:
    """Raise ConfigError for a scale= that does not exist: its group is optional, so that Hydra
    passes over it."""
    known = _scales()
    for override in HydraConfig.get().overrides.task:
        key, _, value = override.partition("=")
        if key == "scale" and value not in known:
            raise unknown("scale", value, known)


def _scales() -> list[str]:
    """The options of the group scale."""
    folder = files("conf") / "scale"
    return [one.name.removesuffix(".yaml") for one in folder.iterdir()]


def _refuse_idle(config: DictConfig) -> None:
    """Raise ConfigError for a word that this experiment has no use for."""
    study = str(OmegaConf.to_container(config.study, resolve=False))
    owners = {"prompt": "estimate", "batch": "estimate", "record": "bench", "fit": "predict"}
    for key, owner in owners.items():
        if config[key] is not None and f"${{{key}}}" not in study:
            raise ConfigError(
                f"{key}={config[key]}: changes nothing here; experiment={owner} takes it"
            )


def _refuse_unused_model(config: DictConfig) -> None:
    """Raise ConfigError for a model= that was typed where the backend serves one of its own."""
    own = OmegaConf.select(config, "backend.model", throw_on_resolution_failure=False)
    for override in HydraConfig.get().overrides.task:
        if own is not None and override.startswith("model=") and override != f"model={own}":
            raise ConfigError(
                f"{override}: is not what backend.model={own} serves; scale=full serves it with "
                "all of the study, backend.model=null with the part that fits a CPU"
            )


def doubtful_bounds(config: Mapping[str, Any]) -> Iterator[str]:
    """Bounds of latencies that are beyond any sense, and so perhaps milliseconds, a line each."""
    study = config.get("study")
    bounds = study.get("bounds") if isinstance(study, Mapping) else None
    for key, value in flat({"slo": config["slo"], "study": {"bounds": bounds or {}}}).items():
        latency = key.rpartition(".")[2].partition("_")[0]
        if latency in _BEYOND and is_number(value) and value >= _BEYOND[latency]:
            yield (
                f"{key}={value:g} is a bound of {value:g} seconds; one of {value:g} ms is "
                f"{value / 1000:g}"
            )


def check_backend(study: Study, command: Command) -> None:
    """Raise ConfigError for a backend that the study cannot be served by."""
    name = command.choices.get("backend")
    if name not in ("sim", "engine", "http"):  # one of the user's own
        backend = RunConfig(command.config).backend
        name = "http" if backend.elsewhere else "engine" if backend.alone else "sim"
    if name not in study.backends:
        raise ConfigError(
            f"backend={name}: experiment={command.experiment} takes "
            f"backend={', '.join(study.backends)}: {study.why or INSIDE}"
        )


def check_arms(study: Study, jobs: Sequence[Job]) -> dict[str, Failure]:
    """Build every arm once; what fails, by the setting at fault ("" for all arms).

    Raises ConfigError for what is wrong with the arms as a whole.
    """
    firsts = list({job.arm: job for job in reversed(jobs)}.values())[::-1]
    if study.one_server:
        for job in firsts:
            refuse_fleet(RunConfig(job.config), "this experiment asks what one server does")
    study.check(firsts)
    _refuse_alike(study, firsts)
    workloads: dict[str, Workload] = {}
    failures: dict[str, Failure] = {}
    arms: dict[str, list[str]] = {}
    for job in firsts:
        try:
            _check(job, workloads)
        except (Exception, SystemExit) as error:  # a user's code may call sys.exit
            failure = failure_of(error, job.config, None)
            failures[failure.reason] = failure
            arms.setdefault(failure.reason, []).append(job.arm)
    every_arm = len(firsts)

    def whose(reason: str) -> str:
        if len(arms[reason]) == every_arm:
            return ""
        return ", ".join(dict.fromkeys(study.key_of(arm) for arm in arms[reason]))

    return {whose(reason): failure for reason, failure in failures.items()}


def _refuse_alike(study: Study, firsts: Sequence[Job]) -> None:
    """Raise ConfigError for two arms that differ in what a server elsewhere never sees alone."""
    seen: dict[str, str] = {}
    for job in firsts:
        backend = RunConfig(job.config).backend
        if not backend.elsewhere:
            continue
        hidden = (*_NO_ARM, *backend.unread)
        sent = {key: value for key, value in job.config.items() if key not in hidden}
        other = seen.setdefault(json.dumps(sent, sort_keys=True, default=str), job.arm)
        if other != job.arm:
            raise ConfigError(
                f"{study.key_of(job.arm)}: sends what {other!r} sends, to the same server: must "
                "differ in workload.* or backend.*, for backend=http knows no other settings"
            )


def processes_of(wanted: int | None, jobs: Sequence[Job]) -> int | None:
    """How many processes may run them; None for as many as there are cores."""
    firsts = {job.arm: job for job in jobs}.values()
    alone = any(RunConfig(job.config).backend.alone for job in firsts)
    if alone and (wanted or 1) > 1:
        raise ConfigError(
            f"jobs={wanted}: must be 1 where times are measured: runs would slow each other down"
        )
    return 1 if alone else wanted


def unused_words(
    study: Study, command: Command, arms: Sequence[Arm], jobs: Sequence[Job]
) -> list[str]:
    """What was typed and changes nothing, a line each."""
    if study.reads is not None:
        whose = f"the settings are those of run={command.config['run']}"
        return [f"{word} changes nothing: {whose}" for word in _idle(study, command)]
    told = [
        f"{word} changes nothing: every arm of experiment={command.experiment} sets it"
        for word in command.words
        if arms and all(word.partition("=")[0] in _keys(arm) for arm in arms)
    ]
    told += [
        f"{word} changes nothing: {why}"
        for word in command.words
        for key, why in study.idle.items()
        if key in (key_of(word), group_of(word))
    ]
    backend = command.choices.get("backend")
    if "scale=full" in command.words and backend not in _scales():
        told.append(f"scale=full changes nothing: backend={backend} takes all of the study anyway")
    backends = [RunConfig(job.config).backend for job in jobs if not job.again]
    unread = [set(backend.unread) for backend in backends]
    everywhere = set.intersection(*unread) if unread else set()
    return told + [
        f"{word} changes nothing: {backends[0].unread_since}"
        for word in command.words
        if group_of(word) in everywhere
    ]


def _idle(study: Study, command: Command) -> Iterator[str]:
    for word in command.words:
        if group_of(word) not in ("experiment", "tracking", "report", *(study.reads or ())):
            yield word


def _keys(arm: Arm) -> set[str]:
    return {change.partition("=")[0] for change in arm.overrides}


def _check(job: Job, workloads: dict[str, Workload]) -> None:
    """Build the arm's objects; a workload that several arms share, such as a long trace, once."""
    _refuse_added(job.config)
    whose = [job.config.get(key) for key in ("workload", "backend", "predictor")]
    settings = json.dumps(whose, sort_keys=True, default=str)
    workloads[settings] = build(job.config, job.seed, workloads.get(settings)).workload


def _refuse_added(config: Mapping[Any, Any] | DictConfig) -> None:
    for section, known in _SECTIONS.items():
        inside = config[section] if section else config
        for key in inside:
            if key not in known:
                where = f"{section}.{key}" if section else key
                raise ConfigError(f"{where}: no such key; {choices(str(key), known)}")
