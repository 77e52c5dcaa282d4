"""Every step that vLLM was recorded to decide, decided again by our scheduler.

The recordings are in data/recordings.zip, and those with KV offloading in data/offload.zip. The
environment variable PAGEDSIM_CONFORMANCE names a folder with more of them, which are then held to
as well. Of these, families that are not built, or differ on purpose, are skipped with the reason; a
family without a known name fails, since skipped it would look as if it had been thought of.
"""

import os
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.conformance import oracle_v0, oracle_v1
from tests.conformance.driver import (
    FAMILIES,
    OFFLOAD_FAMILIES,
    Recording,
    drive,
    family_of,
    first_difference,
    load,
    not_compared,
    recordings,
)

DATA = Path(__file__).parent / "data"
PLAIN = recordings(DATA / "recordings.zip")
OFFLOADED = recordings(DATA / "offload.zip")
BUILT_IN = (*PLAIN, *OFFLOADED)
NUMBERS = {family: 6 if "async" in family else 12 for family in FAMILIES} | dict.fromkeys(
    OFFLOAD_FAMILIES, 2
)
"""Workloads of each family."""
FOLDER = os.environ.get("PAGEDSIM_CONFORMANCE")
EXTRA = recordings(Path(FOLDER).expanduser()) if FOLDER else ()


def held_to(path: Recording) -> ParameterSet:
    """The parameter for a recording: skipped if its family is not compared."""
    why = not_compared(family := family_of(path))
    marks = (pytest.mark.skip(reason=f"{family}: {why}"),) if why else ()
    return pytest.param(path, marks=marks, id=path.name)


def test_the_data_is_complete() -> None:
    assert Counter(map(family_of, BUILT_IN)) == NUMBERS


@pytest.mark.skipif(not FOLDER, reason="PAGEDSIM_CONFORMANCE is not set")
def test_the_folder_in_the_environment_holds_recordings() -> None:
    if not EXTRA:
        pytest.fail(f"PAGEDSIM_CONFORMANCE={FOLDER}: no *.json.gz in it, or no such folder", False)


@pytest.mark.parametrize("path", [held_to(path) for path in (*BUILT_IN, *EXTRA)])
@pytest.mark.parametrize("glide", [False, True], ids=["planned", "glided"])
def test_every_step_is_decided_as_vllm_did(path: Recording, glide: bool) -> None:
    if (family := family_of(path)) not in FAMILIES + OFFLOAD_FAMILIES:
        pytest.fail(f"{path.name}: unknown family {family!r}", pytrace=False)
    workload, steps = load(path)
    decided = islice(drive(workload, glide, check_every=16), len(steps) + 1)
    if family == "offload-livelock":
        decided = islice(decided, len(steps))  # it goes on for ever
    difference = first_difference(steps, decided)
    if difference:
        pytest.fail(f"{path.name}, {difference}", pytrace=False)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("v1-async-prefix", None),
        ("offload-lru", None),
        ("v1-async-spec-draft", "speculative"),
        ("v1-async-new", None),
    ],
)
def test_what_is_skipped_is_named(family: str, why: str | None) -> None:
    assert (why or "") in (not_compared(family) or "") and bool(not_compared(family)) == bool(why)


@pytest.mark.parametrize("path", OFFLOADED, ids=lambda path: path.name)
def test_steps_glided_over_are_those_that_would_be_planned(path: Recording) -> None:
    # Here no tokens are reported, since with tokens nothing is glided over.
    workload, steps = load(path)
    workload = replace(workload, silent=True)
    fields = ("step", "scheduled", "free", "stores", "completed", "finished")
    planned, glided = (
        [
            {field: step[field] for field in fields if field in step}
            for step in islice(drive(workload, glide, check_every=16), len(steps))
        ]
        for glide in (False, True)
    )
    assert planned == glided


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_the_oracles_decide_every_step_as_vllm_did(path: Recording) -> None:
    # What makes the oracles fit to judge the random workloads of test_random.py.
    workload, steps = load(path)
    oracle = oracle_v0 if workload.version == 0 else oracle_v1
    difference = first_difference(steps, oracle.simulate(workload.config, workload.requests))
    if difference:
        pytest.fail(f"{path.name}, {difference}", pytrace=False)
