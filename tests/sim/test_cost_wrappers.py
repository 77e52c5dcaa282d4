"""Cost models over another one: recorded durations by step number, and decodes alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedsim.core import ConfigError, PagedsimError, StepPlan
from pagedsim.sim.cost import CostModel, Decodes, Replay, Roofline
from pagedsim.sim.cost.base import step
from tests.sim.shapes import plan, replica

ESTIMATE = Roofline(replica("llama-3.1-8b", "h100"))


def test_a_step_takes_what_the_recorded_one_took() -> None:
    cost = Replay([0.5, 0.25], ESTIMATE)
    assert cost.step_seconds(plan(100, number=0)) == 0.5
    assert cost.step_seconds(plan(decodes=3, context=30, number=1)) == 0.25
    assert str(cost.explain(plan(100, number=0))) == "prefill: 500 ms, recorded (step 0 100 %)"


def test_the_end_of_the_recording_is_an_error() -> None:
    cost = Replay({3: 0.5, 4: 0.25}, ESTIMATE, "steps.parquet")
    with pytest.raises(PagedsimError) as caught:
        cost.step_seconds(plan(number=5))
    assert str(caught.value) == "steps.parquet: has steps 3 to 4, but the run needs a step 5"


def test_swaps_are_in_the_recording_but_prices_are_estimated() -> None:
    cost = Replay([0.5], ESTIMATE)
    assert cost.swap_seconds(10) == 0.0
    assert cost.prices().swap_seconds(10) == 2 * ESTIMATE.swap_seconds(10)
    assert cost.recompute_seconds(10) == ESTIMATE.recompute_seconds(10)


def test_loaded_from_a_runs_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    columns = {"step": [0, 1], "start": [0.0, 0.5], "end": [0.5, 0.75]}
    pq.write_table(pa.table(columns), path)
    cost = Replay.load(path, ESTIMATE.replica)
    assert [cost.step_seconds(plan(number=i)) for i in (0, 1)] == [0.5, 0.25]
    pq.write_table(pa.table({"step": [0]}), path)
    with pytest.raises(ConfigError, match=r"steps\.parquet: has no column start, end"):
        Replay.load(path, ESTIMATE.replica)
    with pytest.raises(ConfigError, match=r"gone\.parquet: cannot be read: No such file"):
        Replay.load(tmp_path / "gone.parquet", ESTIMATE.replica)
    path.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"steps\.parquet: cannot be read"):
        Replay.load(path, ESTIMATE.replica)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[0.5, -1]", "seconds of step 1=-1: must be a number of at least 0"),
        ("[0.5, NaN]", "seconds of step 1=nan: must be a number"),
        ('["a"]', "seconds of step 0='a': must be a number"),
        ("[]", "holds no steps"),
        ('{"a": 1}', "must be a list of seconds"),
        ("[", "is not JSON"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "durations.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Replay.load(path, ESTIMATE.replica)
    assert str(path) in str(caught.value)


# -- decodes alone ---------------------------------------------------------------------------------


def both() -> tuple[CostModel, CostModel]:
    whole = Roofline(replica("llama-2-7b", "a100-80gb"))
    return whole, Decodes(whole)


def test_prompts_take_no_time_and_decodes_their_own() -> None:
    whole, alone = both()
    decode = step(decodes=8, context=8000)
    assert alone.step_seconds(step(500)) == alone.step_seconds(StepPlan(0, 0.0)) == 0.0
    assert alone.step_seconds(decode) == whole.step_seconds(decode) > 0
    mixed = step(500, decodes=8, context=8000)
    assert alone.step_seconds(mixed) == whole.step_seconds(decode) < whole.step_seconds(mixed)
    assert mixed.prefill_tokens == 500  # asking changes nothing
    assert alone.decode_seconds(8, 8000) == whole.decode_seconds(8, 8000)
    assert alone.explain(mixed) == whole.explain(decode)
    assert alone.work(mixed) == whole.work(decode)


def test_recomputation_is_free_and_swapping_is_not() -> None:
    whole, alone = both()
    assert alone.recompute_seconds(500) == 0.0 < whole.recompute_seconds(500)
    assert alone.swap_seconds(9) == whole.swap_seconds(9) > 0
    assert alone.server_seconds == 0.0
    assert alone.by_totals is whole.by_totals
    assert alone.notices == ["prompts take no time, as if they came computed", *whole.notices]
