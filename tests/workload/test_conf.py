"""The options of `conf/workload` build what they say."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from pagedsim.workload import Workload
from tests.workload.files import AZURE_2023, BAILIAN, BURSTGPT, MOONCAKE, PLAIN, written

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = sorted(path.stem for path in (ROOT / "conf/workload").glob("*.yaml"))
FILES = {
    "trace": PLAIN,
    "azure_conv": AZURE_2023,
    "azure_code": AZURE_2023,
    "burstgpt": BURSTGPT,
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
}

SESSIONS = {"chat_sessions", "agents"}
STAGES = {"shared_prefix"}


def built(option: str, *overrides: str, **settings: Any) -> Workload:
    with initialize_config_module("pagedsim.conf", version_base=None):
        config = compose(overrides=[f"+workload={option}", *overrides])
    made = instantiate(config.workload, **settings)
    assert isinstance(made, Workload)
    return made


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_builds(option: str, tmp_path: Path) -> None:
    if option in FILES:
        made = built(option, f"workload.path={written(tmp_path, FILES[option])}")
        assert len(made) in (3, 4)
    else:
        count = f"workload.{'sessions' if option in SESSIONS else 'requests'}=200"
        if option in STAGES:
            count = "workload.stages=[{rate: 5, seconds: 20}, {rate: 10, seconds: 10}]"
        made, other = (built(option, count, seed=seed) for seed in (1, 2))
        assert (made.turns.count if made.turns else len(made)) == 200
        assert (made.arrival.tolist() != other.arrival.tolist()) == (option != "fixed")


def test_settings_from_a_command_line() -> None:
    made = built(
        "sharegpt", "workload.requests=5", "workload.arrivals=gamma", "workload.cv=3",
        "workload.priority={0:0.5,1:0.5}", "workload.client={a:1.0}",
        "workload.prefixes={tokens:100,count:2}",
    )  # fmt: skip
    assert made.clients == ("a",) and made.prompts is not None
    scaled = built("chat_and_batch", "workload.rate=30", "workload.classes.batch.lengths=alpaca")
    assert scaled.rate == pytest.approx(30, rel=0.2)
