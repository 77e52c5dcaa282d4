"""Rate stages over repeated prompts."""

import re
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.workload import shared_prefix

STAGES = [{"rate": 10, "seconds": 4}, {"rate": 50, "seconds": 2}]
PROMPTS = {"groups": 6, "questions": 5, "prefix_len": 48, "question_len": 16, "output_len": 4}


def made(**settings: Any) -> Any:
    return shared_prefix(**{"stages": STAGES, "pause": 100, **PROMPTS, **settings})


def test_stages_come_one_after_another_at_their_rates() -> None:
    arrival = made(stages=[{"rate": 10, "seconds": 400}, {"rate": 50, "seconds": 80}]).arrival
    assert len(arrival) == 8000 and arrival[4000] - arrival[3999] > 100
    assert [np.ptp(arrival[:4000]), np.ptp(arrival[4000:])] == pytest.approx([400, 80], rel=0.06)


def test_every_prompt_is_asked_once_a_round() -> None:
    prompts = made().prompts
    first, second = ([prompts[row] for row in range(at, at + 30)] for at in (0, 30))
    assert len(set(first)) == 30 and first == second
    assert len({prompt[:48] for prompt in first}) == 6 and len({p[48:] for p in first}) == 30


def test_the_order_is_drawn_by_the_seed() -> None:
    orders = [[made(seed=seed).prompts[row] for row in range(30)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": []}, "stages=[]: must be a list with at least one"),
        ({"stages": [3]}, "stages.0=3: must be {rate, seconds}"),
        ({"stages": [{"rate": 3}]}, "stages.0.seconds: must be given"),
        ({"stages": [{"rate": 0, "seconds": 1}]}, "stages.0.rate=0: must be"),
        ({"stages": [{"rate": 3, "seconds": 1, "n": 1}]}, "stages.0.n: no such setting"),
        ({"stages": [{"rate": 1e6, "seconds": 1e6}]}, "stages.0: 1e+12 requests: must be at most"),
        ({"pause": -1}, "pause=-1: must be"),
        ({"groups": 0}, "groups=0: must be"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        made(**settings)
