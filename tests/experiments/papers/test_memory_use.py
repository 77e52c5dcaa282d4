"""Figure 2 on small runs: the use of every slot by hand, averages, and what is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hydra import compose

from experiments.papers.memory_observed import KINDS, Observed
from experiments.papers.memory_use import MemoryUse
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.run.backend import StoppableRecorder
from pagedsim.run.job import Job, run_job
from pagedsim.workload.lengths import make_lengths
from tests.metrics.tables import steps_of
from tests.run.studies import job_of

SHARES = ("external", "internal", "reserved", "stored")


def study(**more: Any) -> MemoryUse:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "systems": {"most": ["memory=reserved_max"], "paged": ["memory=paged"]},
        "largest": "most",
        "variants": {"longer prompts": ["workload.rate=3"]},
        "published": {"most": [25, 25, 40, 10], "paged": [90, None, None, None]},
        "warm_up": 2.0,
    }
    return MemoryUse(**(settings | more))


# -- the memory, inspected -------------------------------------------------------------------------


def job(folder: Path, *changes: str, inspected: bool = True) -> Job:
    experiment = ["experiment=paper_fig2", "seeds=1", *changes]
    plain = ["backend._target_=pagedsim.run.simulated.Simulated", "~backend.every"]
    return job_of(folder, experiment, [] if inspected else plain)


def served(job: Job) -> Run:
    run = run_job(job, StoppableRecorder())
    assert isinstance(run, Run), run
    return run


ONE = (
    "workload=fixed",
    "workload.requests=1",
    "workload.lengths.prompt=20",
    "workload.lengths.output=5",
    "server.max_model_len=32",
    "backend.every=1",
)


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize(
    ("memory", "owned"),
    [
        (["memory=paged", "memory.blocks=4"], 32),
        (["memory=reserved_max", "memory.blocks=64"], 32),
        (["memory=reserved_pow2", "memory.blocks=64"], 28),
        (["memory=reserved_oracle", "memory.blocks=64"], 25),
    ],
)
def test_every_slot_of_a_single_request(tmp_path: Path, memory: list[str], owned: int) -> None:
    steps = served(job(tmp_path, *ONE, *memory)).steps("decode_seqs", *KINDS).to_pylist()
    assert [step["decode_seqs"] for step in steps] == [0, 1, 1, 1, 1]
    assert np.isnan(steps[0]["stored"])  # its prompt is being computed
    for filled, step in enumerate(steps[1:], start=21):
        slots = {kind: 64 * step[kind] for kind in KINDS}
        assert slots == {
            "stored": filled,
            "reserved": 25 - filled,
            "internal": owned - 25,
            "external": 64 - owned,
        }


@pytest.mark.usefixtures("hydra")
def test_inspections_change_nothing(tmp_path: Path) -> None:
    changes = ("workload.requests=60", "workload.rate=20", "memory.blocks=200")
    seen = served(job(tmp_path / "seen", *changes, "backend.every=5"))
    plain = served(job(tmp_path / "plain", *changes, "backend.fast_forward=true", inspected=False))
    steps = plain.steps()
    assert seen.steps(*steps.column_names).equals(steps)
    assert seen.requests().equals(plain.requests())
    every = seen.steps("step", "prefill_tokens", "stored").to_pylist()
    found = {step["step"] for step in every if not np.isnan(step["stored"])}
    assert found == {s["step"] for s in every if s["step"] % 5 == 0 and not s["prefill_tokens"]}
    with pytest.raises(ConfigError, match="fast_forward=True: must be false"):
        Observed(fast_forward=True)


@pytest.mark.usefixtures("hydra")
def test_orca_max_holds_exactly_seven_and_leaves_8_85_percent(tmp_path: Path) -> None:
    memory = ("memory=reserved_max", "memory.blocks=15728")
    run = served(job(tmp_path, "workload.requests=40", "workload.rate=20", *memory))
    count, left = (
        study(warm_up=5.0, variants=None).read_arms({"most": [run], "paged": [run]}).rows[-2:]
    )
    assert count.what == "arm: requests at once, 15,728 // 2,048"
    assert (count.ours, count.published) == (7, 7)
    assert left.what == "arm: slots that 7 × 2,048 leave over"
    assert left.ours == pytest.approx(left.published) == pytest.approx(8.850, abs=5e-4)


# -- averages --------------------------------------------------------------------------------------


class Seen(Run):
    """Four steps, of which two count: the second for three times as long."""

    def steps(self, *columns: str) -> pa.Table:
        rows = [{"end": 2.0}, {"end": 3.0}, {"end": 6.0}, {"end": 9.0, "waiting": 0}]
        table = steps_of(*({"waiting": 1, "decode_seqs": 7} | row for row in rows))
        for kind, first, then in zip(SHARES, (10, 40, 30, 20), (10, 40, 10, 40), strict=True):
            table = table.append_column(kind, pa.array([0.0, first / 100, then / 100, 0.0]))
        return table.select(list(dict.fromkeys(columns)))


def seen(arm: str) -> list[Run]:
    config = {"server": {"max_model_len": 90}}
    return [Seen(arm, 0, Path(), config, {"total_blocks": 700, "block_size": 1})]


def test_averages_are_over_the_time_in_which_requests_wait() -> None:
    reading = study().read_arms({arm: seen(arm) for arm in study().arms()})
    rows = {row.what: row for row in reading.rows}
    assert rows["most: token states"].ours == pytest.approx((20 + 3 * 40) / 4)
    assert rows["most: token states"].why == "35.0 % with longer prompts"
    assert rows["most: reserved"].ours == pytest.approx((30 + 3 * 10) / 4)
    assert rows["most: internal fragmentation"].ours == pytest.approx(40)
    assert rows["most: internal fragmentation"].why == rows["paged: reserved"].why == ""
    with pytest.raises(ConfigError, match=r"study.warm_up=7: must be shorter: .* no request waits"):
        study(warm_up=7).read_arms({arm: seen(arm) for arm in study().arms()})


def test_variants_are_of_every_system_and_may_be_left_out() -> None:
    arms = study().arms()
    assert list(arms) == ["most", "paged", "most, longer prompts", "paged, longer prompts"]
    assert arms["most, longer prompts"] == ["memory=reserved_max", "workload.rate=3"]
    assert list(study(variants=None).arms()) == ["most", "paged"]
    with pytest.raises(ConfigError, match=r"published\.paged=None: must be 4 numbers"):
        study(published={"most": [1, 2, 3, 4]})


@pytest.mark.usefixtures("hydra")
def test_lengths_are_as_uneven_as_the_variant_says() -> None:
    config = compose("config", overrides=["experiment=paper_fig2"])
    (changes,) = config.study.variants.values()
    workload = compose("config", overrides=["experiment=paper_fig2", *changes]).workload
    lengths = make_lengths(dict(workload.lengths), workload.max_len)
    prompt, output = lengths.sample(100_000, np.random.default_rng(0))
    assert np.median(prompt) == pytest.approx(39, abs=1)
    assert prompt.std() / prompt.mean() == pytest.approx(1.70, abs=0.02)
    assert np.median(output) == pytest.approx(253, abs=2)
    assert output.std() / output.mean() == pytest.approx(0.84, abs=0.01)
    assert (prompt.mean(), output.mean()) == pytest.approx((161.31, 337.99), rel=0.02)
