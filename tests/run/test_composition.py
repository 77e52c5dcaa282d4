"""What is put together of what was composed is what Hydra composes of all of it at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import compose
from omegaconf import DictConfig, OmegaConf

from pagedsim.run import composition
from pagedsim.run.composition import Composition

pytestmark = pytest.mark.usefixtures("hydra")
WORDS = ["experiment=fcfs_vs_priority", "workload.rate=6", "+workload.extra={a: 1}"]


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The words of everything that Hydra is asked to compose."""
    asked: list[list[str]] = []

    def noted(root: str, overrides: list[str]) -> DictConfig:
        asked.append(overrides)
        return compose(root, overrides=overrides)

    monkeypatch.setattr(composition, "compose", noted)
    yield asked


def made() -> Composition:
    whole = compose("config", overrides=WORDS, return_hydra_config=True)
    choices = {str(group): option for group, option in whole.hydra.runtime.choices.items()}
    return Composition(WORDS, choices, compose("config", overrides=WORDS))


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], []),
        (["policy=fcfs"], []),
        (["policy=priority"], [["policy=priority"]]),
        (["policy=priority", "policy=fcfs"], [["policy=priority", "policy=fcfs"]]),
        (["memory.block_size=8", "workload.rate=3"], []),
        (["memory.block_size=8", "policy=vtc"], [["policy=vtc"]]),
        (["study.metrics=[ttft]", "workload.extra={a: {b: [1, 2]}}"], []),
        (["slo.ttft=1", "server.max_seqs=${memory.block_size}"], []),
        (["workload=sharegpt", "predictor=noisy"], [["workload=sharegpt", "predictor=noisy"]]),
        (["+policy.some=1"], [["+policy.some=1"]]),
        (["~workload.extra", "workload.rate=2"], [["~workload.extra"]]),
    ],
)
def test_it_is_what_hydra_makes_of_all_words(
    overrides: list[str], asked: list[list[str]], composed: list[list[str]]
) -> None:
    found = made().of(overrides)
    assert composed == [[*WORDS, *one] for one in asked]
    whole = compose("config", overrides=[*WORDS, *overrides])
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(whole)
    assert list(found) == list(whole)


@pytest.mark.parametrize(
    "wrong",
    ["memory.block_sise=8", "server.max_seqs=many", "policy=pirority", "workload.rate=[", "x=1,2"],
)
def test_what_is_wrong_is_said_by_hydra(wrong: str) -> None:
    with pytest.raises(Exception) as here:
        made().of(["workload.rate=3", wrong])
    with pytest.raises(Exception) as there:
        compose("config", overrides=[*WORDS, "workload.rate=3", wrong])
    assert (type(here.value), str(here.value)) == (type(there.value), str(there.value))


def test_points_of_a_sweep_leave_each_other_alone() -> None:
    several = made()
    sizes = [several.of([f"memory.block_size={size}"]).memory.block_size for size in (8, 16, 32)]
    assert sizes == [8, 16, 32]
    assert several.of([]).workload.rate == 6
