"""Random workloads, decided step by step by ours and by an oracle that knows vLLM's rules alone.

One difference is meant, and the V1 oracle follows it (`unlearn`): a victim that was already
scheduled in this step has the blocks that it registered in this step taken out of the prefix
cache, since they will not be computed; vLLM leaves them in. workloads.py says what else is left
out, and why.
"""

import json
from itertools import islice

import pytest
from hypothesis import settings

from tests.conformance import oracle_v0, oracle_v1
from tests.conformance.driver import Difference, Workload, drive, first_difference
from tests.conformance.workloads import FAMILIES, random_workload, shrink

LONGEST = 1000  # steps of one workload: what comes later is more of the same


def difference(workload: Workload) -> Difference | None:
    """Where ours parts from the oracle, if it does."""
    config, requests = workload.config, workload.requests
    if workload.version == 0:
        oracle = oracle_v0.simulate(config, requests)
    else:
        oracle = oracle_v1.simulate(config, requests, unlearn=True)
    wanted = list(islice(oracle, LONGEST))
    for glide in (False, True):
        ours = islice(drive(workload, glide, check_every=3), LONGEST)
        if found := first_difference(wanted, ours):
            return found
    return None


def fails(workload: Workload) -> bool:
    try:
        return difference(workload) is not None
    except Exception:
        return True


def hold(family: str, seeds: range) -> None:
    """Fail with the first workload of `seeds` that is not decided equally, made small."""
    for seed in seeds:
        workload = random_workload(family, seed)
        if fails(workload):
            small = shrink(workload, fails)
            print(json.dumps({"config": small.config, "requests": small.requests}))
            found = difference(small)  # raises again what made it fail, if that was an exception
            pytest.fail(f"{workload.name}, made small: {found}", pytrace=False)


def test_what_a_victim_gives_back_goes_to_the_prompt_behind_it() -> None:
    # Rare among the random ones: the second needs a block in a step in which the first, less
    # urgent, was already scheduled, and the third has a prompt that takes all that is left.
    config = {
        "block_size": 2,
        "gpu_blocks": 4,
        "max_seqs": 8,
        "max_model_len": 8,
        "policy": "priority",
        "max_batched_tokens": 3,
    }
    requests = [
        {"id": 0, "arrival_step": 0, "prompt_len": 1, "output_len": 4, "priority": 1},
        {"id": 1, "arrival_step": 1, "prompt_len": 1, "output_len": 3},
        {"id": 2, "arrival_step": 1, "prompt_len": 4, "output_len": 1},
    ]
    (step,) = (s for s in oracle_v1.simulate(config, requests) if s["preempted"])
    assert (step["preempted"], step["scheduled"]) == ([0], [[1, 1], [2, 2]])
    assert difference(Workload("given back", 1, config, requests)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_random_workloads_are_decided_as_the_rules_say(family: str) -> None:
    hold(family, range(settings().max_examples * 3 // 5))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_workloads_are_decided_as_the_rules_say(family: str) -> None:
    hold(family, range(1000, 3000))
