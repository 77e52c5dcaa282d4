"""The life of a study: check it, run its arms round by round, publish what they show.

The checks come before any run, so that no mistake is found late.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from pagedsim.core import ConfigError
from pagedsim.core.errors import choices
from pagedsim.metrics.result import added_up
from pagedsim.report.figures import check_formats
from pagedsim.requirements import refuse_older
from pagedsim.run import provenance
from pagedsim.run.folder import keep_configuration
from pagedsim.run.job import Arm, Failure, Job, error_of, failure_of, lines_of
from pagedsim.run.parts import Parts, Refusal, build, refuse_fleet
from pagedsim.run.plausible import doubtful, doubtful_times, idle_offload, idle_swaps, unshared
from pagedsim.run.pool import preparing
from pagedsim.run.publish import Published, publish
from pagedsim.run.runs import Key, Runs, goes_on, some
from pagedsim.run.store import Store, Summaries, Tables
from pagedsim.run.study import Study
from pagedsim.spec.composed import missing_keys
from pagedsim.spec.objects import lives_here, load_plugins, make
from pagedsim.spec.roots import OF_THE_STUDY
from pagedsim.spec.run import RunSpec
from pagedsim.spec.study import StudySpec
from pagedsim.spec.words import group_of, key_of
from pagedsim.tracking import SETTINGS, check_settings
from pagedsim.user_error import Interruption, UserError
from pagedsim.workload import Workload


class Execution:
    """One study, from its first question to what it leaves."""

    def __init__(self, study: Study, spec: StudySpec, quiet: bool = False) -> None:
        self.study, self.spec = study, spec
        self.runs = Runs(spec, quiet=quiet)
        self.published: Published | None = None

    @classmethod
    def of(cls, spec: StudySpec, quiet: bool = False) -> Execution:
        """That of a specification; raises ConfigError for what is wrong with it."""
        refuse_older()
        provenance.begin()
        load_plugins(spec.config["plugins"])
        check_base(spec)
        study: Study = make("study", spec.config["study"], Study)
        for missing in missing_keys(spec.config):
            raise ConfigError(f"{missing}: must be given: {missing}=...")
        return cls(study, spec, quiet)

    def execute(self, stored: bool = False) -> None:
        """All of it; raises errors of runs once the results of the others are published.

        `stored`: ConfigError where a run is not in the folder yet.
        """
        self.runs.stored = stored
        check_backend(self.study, self.spec)
        refuse_words(self.study, self.spec)
        arms = self.study.next_runs(self.runs)
        jobs = self.runs.jobs_of(arms, self.study.key_of)
        self._processes = processes_of(self.spec.config["jobs"], jobs)
        remarks: list[str] = []
        if refused := check_arms(self.study, jobs, remarks, self.runs.built):
            raise error_of(refused)
        keep_configuration(self.spec.config, self.spec.folder)
        self._note(arms, jobs, remarks)
        self._run(jobs)
        if not (self.study.whole and (self.runs.interrupted or self.runs.failed)):
            self.published = publish(self.study, self.runs)
        self._complain()

    def _note(self, arms: Sequence[Arm], jobs: Sequence[Job], remarks: Sequence[str]) -> None:
        """Note what a reader must know before the first run."""
        config, words = self.spec.config, [*map(str, self.spec.words)]
        unused = unused_words(self.study, self.spec, arms, jobs)
        unused += [*idle_swaps(words, arms, jobs), *idle_offload(words, arms, jobs)]
        alone = (line for job in jobs for line in lives_here(job.config))
        notes = [*self.spec.notes, *doubtful(config), *remarks, *unused, *alone]
        for line in dict.fromkeys(notes):
            self.runs.note(line)

    def _run(self, jobs: Sequence[Job]) -> None:
        """Rounds, until the study asks for nothing more."""
        store: Store = Tables() if self.study.keeps_tables else Summaries()
        try:
            while jobs:
                asked_to_stop = self.runs.serve(jobs, self._processes, store)
                if self.runs.interrupted:
                    return
                jobs = self._next()
                if asked_to_stop and jobs:
                    self.runs.interrupted = True
                    return
        except KeyboardInterrupt:  # between two runs
            self.runs.interrupted = True

    def _next(self) -> list[Job]:
        """The next jobs; arms that cannot be configured count as failed."""
        while True:
            failed = len(self.runs.failed)
            arms = self.study.next_runs(self.runs)
            jobs = self.runs.jobs_of(arms, self.study.key_of)
            if jobs or len(self.runs.failed) == failed:
                return jobs

    def _complain(self) -> None:
        """Say what is missing, if anything is."""
        runs, folder = self.runs, self.spec.folder
        if runs.interrupted:
            raise Interruption(f"{self._told(runs)}; {goes_on(folder)}")
        if self.published and (wrong := self.published.reading.wrong):
            raise error_of(wrong)
        if runs.failed:
            raise error_of(runs.reasons)
        done = runs.in_order
        if done and not any(run.summary.get("finished") for run in done):
            why = added_up([run.summary for run in done])
            raise UserError([": ".join(["no request finished", *why[:1]])])

    def _told(self, runs: Runs) -> str:
        """How far a study came that was stopped."""
        text = self.study.progress(runs)
        if self.published and self.published.arms and self.published.arms.runs:
            shown = len(self.published.arms.runs)
            some = "and" if shown == len(runs.finished) else f"{shown} of them"
            text += f", {some} in the report"
        if runs.stopped:
            text += f"; {runs.stopped} more left the tables of what they had so far"
        return "; failed: ".join([text, *lines_of(runs.reasons)])


INSIDE = "it asks what happens inside a server"
"""Why a study does not support a server elsewhere."""
_HARDLY = 0.5
"""The share of a workload that may be too long for a server, and nothing is said at the start."""


def check_base(spec: StudySpec) -> None:
    """Raise ConfigError for what is wrong with a study whatever its arms are."""
    config = spec.config
    if not isinstance(config["study"], Mapping):
        raise ConfigError("study: must be given; choose an experiment=")
    for key in missing_keys({"study": config["study"]}):
        raise ConfigError(f"{key}: must be given: {key}=...")
    tracking = config["tracking"]
    if not isinstance(tracking, Mapping):
        raise ConfigError("tracking: must be given; choose tracking=none or tracking=wandb")
    _refuse_idle(spec)
    _refuse_unused_model(spec)
    for key in tracking:
        if key not in SETTINGS:
            raise ConfigError(f"tracking.{key}: no such key; {choices(str(key), SETTINGS)}")
    for key in SETTINGS:
        if key not in tracking:
            raise ConfigError(f"tracking.{key}: must be given; tracking=wandb has all of them")
    check_settings(**{key: tracking[key] for key in SETTINGS})
    check_formats(config["figures"])


def _refuse_idle(spec: StudySpec) -> None:
    """Raise ConfigError for a word that this experiment has no use for."""
    study = str(spec.composed.tree["study"])
    owners = {
        "prompt": "estimate",
        "batch": "estimate",
        "record": "bench",
        "fit": "predict",
        "requests": "calibrate",
        "run": "replay",
    }
    for key, owner in owners.items():
        value = spec.config[key]
        if value is not None and f"${{{key}}}" not in study:
            raise ConfigError(f"{key}={value}: changes nothing here; experiment={owner} takes it")


def _refuse_unused_model(spec: StudySpec) -> None:
    """Raise ConfigError for a model= that was given where the backend serves one of its own."""
    backend = spec.config["backend"]
    served = backend.get("model") if isinstance(backend, Mapping) else None
    for word in map(str, spec.words):
        if served is not None and word.startswith("model=") and word != f"model={served}":
            raise ConfigError(
                f"{word}: is not what backend.model={served} serves; scale=full serves it with "
                "all of the study, backend.model=null with the part that fits a CPU"
            )


def check_backend(study: Study, spec: StudySpec) -> None:
    """Raise ConfigError for a backend that the study cannot be served by."""
    name = spec.choices.get("backend")
    if name not in ("sim", "engine", "http"):  # one of the user's own
        backend = RunSpec(spec.config).backend
        name = "http" if backend.elsewhere else "engine" if backend.alone else "sim"
    if name not in study.backends:
        raise ConfigError(
            f"backend={name}: experiment={spec.experiment} takes "
            f"backend={', '.join(study.backends)}: {study.why or INSIDE}"
        )


def refuse_words(study: Study, spec: StudySpec) -> None:
    """Raise ConfigError for a word that the study cannot follow."""
    for word in spec.words:
        for key, why in study.refused.items():
            if key in (key_of(word), group_of(word)):
                raise ConfigError(f"{word}: experiment={spec.experiment} cannot take it: {why}")


def check_arms(
    study: Study, jobs: Sequence[Job], remarks: list[str], built: dict[Key, Parts]
) -> dict[str, Failure]:
    """Build every arm once; what fails, by the setting at fault ("" for all arms).

    What a reader must know of the arms beforehand is added to `remarks`, and what was built to
    `built`. Raises ConfigError for what is wrong with the arms as a whole.
    """
    firsts = list({job.arm: job for job in reversed(jobs)}.values())[::-1]
    if study.one_server:
        for job in firsts:
            refuse_fleet(RunSpec(job.config), "this experiment asks what one server does")
    study.check(firsts)
    _refuse_alike(study, firsts)
    workloads: dict[str, Workload] = {}
    failures: dict[str, Failure] = {}
    arms: dict[str, list[str]] = {}
    refusals: dict[Refusal, list[str]] = {}
    for job in preparing(firsts):
        requests = _requests_of(job)
        try:
            parts = build(job.config, job.seed, workloads.get(requests))
            workloads[requests] = parts.workload
            built[job.arm, job.number] = parts
            refusals.setdefault(parts.refusal(), []).append(job.arm)
            remarks += doubtful(job.config)
            remarks += doubtful_times(job.config["workload"], parts.workload)
            remarks += unshared(job.config, parts.workload)
        except (Exception, SystemExit) as error:  # a user's code may call sys.exit
            failure = failure_of(error, job.config, None)
            failures[failure.reason] = failure
            arms.setdefault(failure.reason, []).append(job.arm)
    remarks += _refusals(refusals)

    def whose(reason: str) -> str:
        if len(arms[reason]) == len(firsts):
            return ""
        return ", ".join(dict.fromkeys(study.key_of(arm) for arm in arms[reason]))

    return {whose(reason): failure for reason, failure in failures.items()}


def _requests_of(job: Job) -> str:
    """What decides a job's requests: arms with the same, such as a long trace, share them."""
    settings = [job.config.get(key) for key in ("workload", "backend", "predictor")]
    return json.dumps([job.seed, *settings], sort_keys=True, default=str)


def _refusals(refusals: Mapping[Refusal, Sequence[str]]) -> Iterator[str]:
    """Where most of what arms are sent can never be served; ConfigError if it is all of it."""
    if refusals and all(refusal.whole for refusal in refusals):
        first = next(iter(refusals))
        raise ConfigError(f"workload: none of {first.of:,} requests can be served: {first.reason}")
    for refusal, arms in refusals.items():
        if refusal.refused > _HARDLY * refusal.of:
            yield str(refusal) if len(refusals) == 1 else f"{some(arms)}: {refusal}"


def _refuse_alike(study: Study, firsts: Sequence[Job]) -> None:
    """Raise ConfigError for two arms that differ in what a server elsewhere never sees alone."""
    seen: dict[str, str] = {}
    for job in firsts:
        backend = RunSpec(job.config).backend
        if not backend.elsewhere:
            continue
        hidden = (*OF_THE_STUDY, *backend.unread)
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
    alone = any(RunSpec(job.config).backend.alone for job in firsts)
    if alone and (wanted or 1) > 1:
        raise ConfigError(
            f"jobs={wanted}: must be 1 where times are measured: runs would slow each other down"
        )
    return 1 if alone else wanted


def unused_words(
    study: Study, spec: StudySpec, arms: Sequence[Arm], jobs: Sequence[Job]
) -> list[str]:
    """What was typed and changes nothing, a line each."""
    if study.reads is not None:
        whose = f"the settings are those of run={spec.config['run']}"
        taken = ("experiment", "tracking", "report", *study.reads)
        idle = (word for word in spec.words if group_of(word) not in taken)
        return [f"{word} changes nothing: {whose}" for word in idle]
    keys = [{key_of(change) for change in arm.overrides} for arm in arms]
    lines = [
        f"{word} changes nothing: every arm of experiment={spec.experiment} sets it"
        for word in spec.words
        if not str(word).startswith("+")  # which arms may then set
        and keys
        and all(key_of(word) in arm_keys for arm_keys in keys)
    ]
    lines += [
        f"{word} changes nothing: {why}"
        for word in spec.words
        for key, why in study.idle.items()
        if key in (key_of(word), group_of(word))
    ]
    backend = spec.choices.get("backend")
    if "scale=full" in map(str, spec.words) and backend not in spec.conf.options_of("scale"):
        lines.append(f"scale=full changes nothing: backend={backend} takes all of the study anyway")
    backends = [RunSpec(job.config).backend for job in jobs if not job.again]
    unread = [set(backend.unread) for backend in backends]
    everywhere = set.intersection(*unread) if unread else set()
    lines += [
        f"{word} changes nothing: {backends[0].unread_since}"
        for word in spec.words
        if group_of(word) in everywhere
    ]
    every = dict.fromkeys([*spec.words, *(change for arm in arms for change in arm.overrides)])
    routers = [word for word in every if group_of(word) == "router"]
    searched = any(key.startswith("fleet.") for arm in arms for key in arm.changes)
    if not routers or searched or "router" in everywhere:
        return lines
    if all(RunSpec(job.config).fleet.alone for job in jobs):
        lines += [
            f"{word} changes nothing: fleet.replicas=1 is a server without a router"
            for word in routers
        ]
    return lines
