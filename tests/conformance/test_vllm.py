"""Every step that vLLM was recorded to decide, decided again by our scheduler.

The recordings are in data/recordings.zip. The environment variable PAGEDSIM_CONFORMANCE names a
folder with more of them, which are then held to as well.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.conformance import oracle_v0, oracle_v1
from tests.conformance.driver import (
    FAMILIES,
    Recording,
    drive,
    first_difference,
    load,
    recordings,
)

BUILT_IN = recordings(Path(__file__).parent / "data" / "recordings.zip")
EXTRA = os.environ.get("PAGEDSIM_CONFORMANCE")
ALL = [*BUILT_IN, *(recordings(Path(EXTRA).expanduser()) if EXTRA else [])]


def test_the_data_is_complete() -> None:
    families = Counter(path.name.rpartition("-")[0] for path in BUILT_IN)
    assert families == dict.fromkeys(FAMILIES, 12)


@pytest.mark.skipif(not EXTRA, reason="PAGEDSIM_CONFORMANCE is not set")
def test_the_folder_in_the_environment_holds_recordings() -> None:
    if len(ALL) == len(BUILT_IN):
        pytest.fail(f"PAGEDSIM_CONFORMANCE={EXTRA}: no *.json.gz in it, or no such folder", False)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
@pytest.mark.parametrize("glide", [False, True], ids=["planned", "glided"])
def test_every_step_is_decided_as_vllm_did(path: Recording, glide: bool) -> None:
    workload, steps = load(path)
    difference = first_difference(steps, drive(workload, glide, check_every=16))
    if difference:
        pytest.fail(f"{path.name}, {difference}", pytrace=False)


@pytest.mark.parametrize("path", BUILT_IN, ids=lambda path: path.name)
def test_the_oracles_decide_every_step_as_vllm_did(path: Recording) -> None:
    # What makes the oracles fit to judge the random workloads of test_random.py.
    workload, steps = load(path)
    oracle = oracle_v0 if workload.version == 0 else oracle_v1
    difference = first_difference(steps, oracle.simulate(workload.config, workload.requests))
    if difference:
        pytest.fail(f"{path.name}, {difference}", pytrace=False)
