"""Every step that SGLang was recorded to decide, decided again by our scheduler.

The recordings are in data/sglang.zip and, with a host tier, in data/hicache.zip;
PAGEDSIM_CONFORMANCE may name a folder with more of them.
"""

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pagedsim.build import make_scheduler
from pagedsim.core import Request
from pagedsim.sglang import RadixMemory, SGLang
from tests.conformance import sglang
from tests.conformance.driver import Recording, family_of, first_difference, recordings


def is_sglang(family: str) -> bool:
    """Whether the recordings are of SGLang."""
    return family.startswith(("sgl-", "idle", "overlap", "hicache"))


DATA = Path(__file__).parent / "data"
PLAIN = recordings(DATA / "sglang.zip")
TIERED = recordings(DATA / "hicache.zip")
EXTRA = os.environ.get("PAGEDSIM_CONFORMANCE")
FOUND = recordings(Path(EXTRA).expanduser()) if EXTRA else []
ALL = [*PLAIN, *TIERED, *(path for path in FOUND if is_sglang(family_of(path)))]


def load(path: Recording) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def test_the_data_is_complete() -> None:
    for paths, count, each in ((PLAIN, 45, 4), (TIERED, 29, 2)):
        families = Counter(map(family_of, paths))
        assert len(families) == count
        assert set(families.values()) == {each}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_every_step_is_decided_as_sglang_did(path: Recording) -> None:
    data = load(path)
    drive = sglang.drive_overlapped if data["config"].get("overlap") else sglang.drive
    got = drive(data["config"], data["requests"], check_every=16)
    if difference := first_difference(data["steps"], got):
        pytest.fail(f"{path.name}, {difference}", pytrace=False)


SYNCHRONOUS = [path for path in [*PLAIN, *TIERED] if not path.name.startswith("overlap-")]


@pytest.mark.parametrize("path", SYNCHRONOUS, ids=lambda path: path.name)
def test_fast_forwarded_steps_are_those_that_are_planned(path: Recording) -> None:
    data = load(path)
    planned, glided = (
        sglang.drive(data["config"], data["requests"], glide, False, check_every=16)
        for glide in (False, True)
    )
    if difference := first_difference(planned, glided):
        pytest.fail(f"{path.name}, {difference}", pytrace=False)


def test_a_prompt_may_be_withdrawn_between_its_chunks() -> None:
    here, there = (
        make_scheduler(
            memory=RadixMemory(1000), batching=SGLang(chunked_prefill_size=64), max_model_len=500
        )
        for _ in range(2)
    )
    moved = Request("moved", 300)
    here.add(moved, 0.0, 4)
    here.commit(here.plan(0.0), 0.0)
    there.add(moved, 0.0, here.withdraw(moved, 0.0))
    there.plan(0.0)
    here.add(Request("next", 100), 0.0, 4)
    assert [chunk.request.id for chunk in here.plan(0.0).chunks] == ["next"]
    here.check()
