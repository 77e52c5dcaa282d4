"""Studies: which runs they consist of, that arms are fed alike, and what came of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagedsim.backends.base import StoppableRecorder
from pagedsim.experiments.studies.compare import Compare
from pagedsim.metrics.arms import Run
from pagedsim.metrics.files import read_summary
from pagedsim.run import store as of_store
from pagedsim.run.job import Interrupted, Job, run_job
from pagedsim.run.publish import arms_of
from pagedsim.run.runner import unused_words
from pagedsim.run.runs import Runs
from pagedsim.run.store import Recipe, Store, Summaries, Tables, recipe_of
from pagedsim.run.study import Study
from tests.run.studies import Impatient, command, job_of, served

QUICK = ["experiment=single", "workload.requests=30", "workload.rate=20", "seeds=2", "jobs=1"]
ARMS = {"fcfs": ["policy=fcfs"], "urgent": ["policy=priority"], "small": ["server.max_seqs=4"]}
PLAN = Compare("A title", "A question?", ARMS)

TABLES = Tables()


def jobs(folder: Path, *overrides: str, plan: Study = PLAN) -> list[Job]:
    runs = Runs(command(folder, *QUICK, *overrides))
    return runs.jobs_of(plan.next_runs(runs), plan.key_of)


def told(plan: Study, *words: str) -> list[str]:
    """The words that change nothing, as the runner tells of them."""
    runs = Runs(command(Path("out"), *words))
    arms = plan.next_runs(runs)
    lines = unused_words(plan, runs.spec, arms, runs.jobs_of(arms, plan.key_of))
    return [line.partition(" changes nothing")[0] for line in lines]


def store(job: Job, made_of: Recipe) -> bool:
    return TABLES.store(job, made_of, Run(job.arm, job.number, job.folder, job.config, {}))


def run_plan(folder: Path, *more: str, plan: Study = PLAN) -> Runs:
    return served(plan, folder, [*QUICK, *more])


# -- plans -----------------------------------------------------------------------------------------


def test_what_every_arm_sets_need_not_be_typed() -> None:
    plan = Compare("t", "q", {"a": ["policy=fcfs", "memory=prefix"], "b": ["policy=priority"]})
    assert told(plan, "policy=priority", "memory=paged", "seeds=2") == ["policy=priority"]


def test_an_engine_reads_no_data_sheet() -> None:
    typed = ["hardware=h100", "cost.bus_efficiency=0.5", "policy=priority"]
    plan = Compare("t", "q", {"a": ["backend=engine"], "b": ["backend=engine", "policy=fcfs"]})
    assert told(plan, *QUICK, *typed) == typed[:2]
    mixed = Compare("t", "q", {"a": ["backend=engine"], "b": []})
    assert told(mixed, *QUICK, *typed) == []


@pytest.mark.parametrize("name", ["../up", "a b", "käse"])
def test_any_name_of_an_arm_is_a_folder_below_runs(tmp_path: Path, name: str) -> None:
    [job, _] = jobs(tmp_path, plan=Compare("t", "q", {name: [], "other": []}))[:2]
    assert job.folder.parent.parent == tmp_path / "runs"
    assert job.folder.resolve() == job.folder


def test_a_router_needs_replicas() -> None:
    routers = Compare("A title", "A question?", {"a": ["router=sticky"], "b": ["router=random"]})
    assert told(routers, *QUICK) == ["router=sticky", "router=random"]
    assert told(routers, *QUICK, "fleet.replicas=2") == []
    assert told(PLAN, *QUICK, "router=sticky") == ["router=sticky"]


# -- runs ------------------------------------------------------------------------------------------


def asked(run: Run) -> list[list[object]]:
    """What a run was fed with."""
    names = ("request", "client", "priority", "arrival", "prompt_tokens", "output_tokens")
    return [run.requests(name)[name].to_pylist() for name in names]


def test_arms_see_the_same_requests_and_seeds_others(tmp_path: Path) -> None:
    runs = run_plan(tmp_path)
    assert not runs.failed
    for seed in (0, 1):
        fcfs, urgent, small = (asked(runs.finished[arm, seed]) for arm in ARMS)
        assert fcfs == urgent == small
    assert asked(runs.finished["fcfs", 0]) != asked(runs.finished["fcfs", 1])


CLASSES = ("workload=chat_and_batch", "workload.requests=40")


def test_columns_that_a_study_chose_are_joined_by_its_objective_alone(tmp_path: Path) -> None:
    runs = run_plan(tmp_path, *CLASSES, "+slo.clients.batch.e2e=60")
    chosen = arms_of(replace(PLAN, metrics=("ttft",)), runs).metrics
    assert chosen == ("ttft", "goodput_per_s", "slo_attainment")
    summary = runs.finished["fcfs", 0].summary
    met = [summary["clients"][name]["slo_attainment"] for name in ("interactive", "batch")]
    assert met[0] == 1 and 0 < met[1] <= 1


def test_only_seeds_that_every_arm_has_are_compared(tmp_path: Path) -> None:
    runs = run_plan(tmp_path)
    del runs.finished["small", 1]
    runs.interrupted = True
    study = arms_of(PLAN, runs)
    assert [(run.arm, run.seed) for run in study.runs] == [(arm, 0) for arm in ARMS]
    assert study.failed == {
        "interrupted": "5 of 6 runs are complete",
        "left out": "2 complete runs, under seeds that not every arm has completed",
    }


def test_an_arm_that_draws_nothing_is_run_once(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,8,4\n1,8,4\n")
    trace = ["experiment=single", "workload=trace", f"workload.path={file}", "seeds=3"]
    plan = Compare("t", "q", {"a": [], "drawn": ["workload.priority={0:0.5,1:0.5}"]})
    runs = served(plan, tmp_path, trace)
    assert sorted(runs.finished) == [("a", 0), *(("drawn", seed) for seed in range(3))]
    assert (len(runs.repeated), runs.wanted, runs.interrupted) == (2, 4, False)


def test_a_policy_or_router_that_draws_is_run_under_each_seed(tmp_path: Path) -> None:
    drawing = {
        "policy": ["policy._target_=tests.core.odd_policies.Lottery"],
        "inner": ["policy=aging", "policy.of={_target_: tests.core.odd_policies.Lottery}"],
        "router": ["router=random", "fleet.replicas=2"],
        "failures": ["fleet.replicas=2", "fleet.failures={mean_between: 3600, mean_repair: 5}"],
    }
    file = tmp_path / "trace.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,8,4\n1,8,4\n")
    trace = ["experiment=single", "workload=trace", f"workload.path={file}", "seeds=2"]
    runs = served(Compare("t", "q", {"plain": [], **drawing}), tmp_path, trace)
    wanted = {("plain", 0), *((arm, seed) for arm in drawing for seed in range(2))}
    assert runs.finished.keys() == wanted


# -- stopping, and runs that are there already -----------------------------------------------------


def test_a_stopped_run_leaves_whole_tables(tmp_path: Path) -> None:
    job = jobs(tmp_path)[0]
    assert run_job(job, Impatient(10)) == Interrupted(job.folder)
    partial = Run(job.arm, job.seed, job.folder, job.config, read_summary(job.folder))
    requests, steps = partial.requests(), partial.steps()
    whole = run_job(job, StoppableRecorder())
    assert isinstance(whole, Run)
    assert partial.summary["partial"]
    assert not whole.summary["partial"]
    assert 10 <= steps.num_rows < whole.steps().num_rows
    assert steps.equals(whole.steps().slice(0, steps.num_rows))
    states = requests["state"].to_pylist()
    assert states.count("unfinished") == partial.summary["unfinished"] > 0
    ids = requests["request"].to_pylist()
    assert ids == sorted(set(ids))  # each once


def kept(job: Job) -> Run | None:
    """The run as a resumed study finds it."""
    return TABLES.stored(job, recipe_of(job))


def test_a_complete_run_is_found_again(tmp_path: Path) -> None:
    job = jobs(tmp_path)[0]
    assert kept(job) is None
    run = run_job(job, StoppableRecorder())
    assert isinstance(run, Run)
    assert kept(job) is None  # its tables are there, but not marked as complete
    assert store(job, recipe_of(job))
    again = kept(job)
    assert again is not None
    assert again.folder == run.folder
    assert json.dumps(again.summary, sort_keys=True) == json.dumps(run.summary, sort_keys=True)


def changed(job: Job, **settings: object) -> Job:
    return Job(job.arm, job.seed, job.config | settings, job.folder)


def test_a_run_of_other_settings_is_not_kept(tmp_path: Path) -> None:
    job = jobs(tmp_path)[0]
    run_job(job, StoppableRecorder())
    store(job, recipe_of(job))
    assert kept(changed(job, seeds=7, jobs=3, report=False)) is not None
    assert kept(changed(job, tensor_parallel=2)) is None
    assert kept(Job(job.arm, 1, job.config, job.folder)) is None


def test_a_run_of_another_simulator_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(tmp_path)[0]
    run_job(job, StoppableRecorder())
    store(job, recipe_of(job))
    monkeypatch.setattr(of_store, "of_the_simulator", lambda: "another")
    assert kept(job) is None


def test_a_run_of_other_code_or_of_another_file_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source, helper = tmp_path / "changing_policy.py", tmp_path / "changing_helper.py"
    trace = tmp_path / "trace.csv"
    source.write_text(
        "import changing_helper\nfrom pagedsim.core import Policy\nclass Mine(Policy): pass\n"
    )
    helper.write_text("WEIGHT = 1\n")
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,10\n")
    overrides = ["workload=trace", f"workload.path={trace}", "workload.drop_empty=true"]
    overrides += ["policy._target_=changing_policy.Mine"]
    job = job_of(tmp_path, ["experiment=single", *overrides])
    assert isinstance(run_job(job, StoppableRecorder()), Run)
    for file in (source, helper, trace):
        assert store(job, recipe_of(job))
        assert kept(job) is not None
        file.write_text(file.read_text() + "\n")
        assert kept(job) is None


@pytest.mark.parametrize("content", ["[]", "{}", '"text"', "3", '{"finished": []}'])
@pytest.mark.parametrize("store", [TABLES, Summaries()])
def test_a_summary_of_another_shape_is_no_complete_run(
    store: Store, content: str, tmp_path: Path
) -> None:
    job = jobs(tmp_path)[0]
    made_of, run = recipe_of(job), run_job(job, StoppableRecorder())
    assert isinstance(run, Run) and store.store(job, made_of, run)
    assert store.stored(job, made_of) is not None
    for file in (job.folder / "summary.json", job.folder.with_name(f"{job.folder.name}.json")):
        if file.exists():
            file.write_text(content)
    assert store.stored(job, made_of) is None


def test_code_that_changes_while_it_runs_is_kept_under_neither_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "edited_policy.py"
    source.write_text(
        "from pathlib import Path\n"
        "from pagedsim.core import Policy\n"
        "class Mine(Policy):\n"
        "    def __init__(self):\n"
        "        Path(__file__).write_text(Path(__file__).read_text() + '# edited\\n')\n"
    )
    plan = Compare("t", "q", {"same": [], "edited": ["policy._target_=edited_policy.Mine"]})
    runs = run_plan(tmp_path, plan=plan)
    assert (len(runs.finished), runs.changed) == (4, {"edited"})
    assert [job.arm for job in runs.jobs if kept(job)] == ["same", "same"]
