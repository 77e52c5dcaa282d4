"""Compositions: arms and rounds have the configuration that Hydra composes of all words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from pagedsim.core import ConfigError
from pagedsim.run import compose as composing
from pagedsim.run.compose import Composition, single
from pagedsim.run.job import Job
from pagedsim.run.objects import require_kinds
from tests.run.studies import command

# -- what is put together of what was composed is what Hydra composes of all of it at once ---------


pytestmark = pytest.mark.usefixtures("hydra")
WORDS = ["experiment=fcfs_vs_priority", "workload.rate=6", "+workload.extra={a: 1}"]


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The words of everything that Hydra is asked to compose."""
    asked: list[list[str]] = []

    def noted(root: str, overrides: list[str]) -> DictConfig:
        asked.append(overrides)
        return compose(root, overrides=overrides)

    monkeypatch.setattr(composing, "compose", noted)
    yield asked


def made(words: Sequence[str] = WORDS) -> Composition:
    whole = compose("config", overrides=[*words], return_hydra_config=True)
    choices = {str(group): option for group, option in whole.hydra.runtime.choices.items()}
    return Composition(words, choices, compose("config", overrides=[*words]))


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        (["policy=priority"], []),
        (["policy=priority", "model=opt-13b", "policy.displace=true"], []),
        (["memory.block_size=8", "workload.rate=3"], []),
        (["memory.block_size=8", "policy=vtc"], []),
        (["backend=engine"], [["backend=engine"]]),  # an option of `scale` goes by it
        (["slo.ttft=1", "server.max_seqs=${memory.block_size}"], []),
        (["workload=sharegpt", "predictor=noisy"], [["workload=sharegpt", "predictor=noisy"]]),
        (["+policy.some=1"], [["+policy.some=1"]]),
        (["~workload.extra", "workload.rate=2"], [["~workload.extra"]]),
    ],
)
def test_a_composition_equals_that_of_hydra(
    overrides: list[str], asked: list[list[str]], composed: list[list[str]]
) -> None:
    found = made().of(overrides)
    assert composed == [[*WORDS, *one] for one in asked]
    whole = compose("config", overrides=[*WORDS, *overrides])
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(whole)
    assert list(found) == list(whole)


@pytest.mark.parametrize(
    "wrong",
    ["memory.block_sise=8", "workload.rate=[", "x=1,2"],
)
def test_errors_are_those_of_hydra(wrong: str) -> None:
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


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=fairness"],  # has its own settings of the policy
        ["experiment=policy_zoo", "policy.victim=rank"],
        ["experiment=policy_zoo", "+policy@workload.extra=priority"],
    ],
    ids=" ".join,
)
def test_an_option_that_others_add_to_is_not_exchanged(
    words: list[str], composed: list[list[str]]
) -> None:
    found = made(words).of(["policy=priority"])
    assert composed == [[*words, "policy=priority"]]
    assert found == compose("config", overrides=[*words, "policy=priority"])


@pytest.mark.parametrize("option", ["--config-dir", "--config-path"])
def test_nothing_is_exchanged_where_another_folder_of_configurations_is_named(
    option: str, tmp_path: Path, composed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = GlobalHydra.instance().config_loader()
    sources = loader.get_sources()
    if option == "--config-dir":
        sources = [FileConfigSource("command-line", f"file://{tmp_path}"), *sources]
    else:
        main = FileConfigSource("main", f"file://{Path(str(files('conf')))}")
        sources = [main if one.provider == "main" else one for one in sources]
    monkeypatch.setattr(loader, "get_sources", lambda: sources)
    made().of(["policy=priority"])
    assert composed == [[*WORDS, "policy=priority"]]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["fcfs_vs_priority", "migration"])
def test_every_option_is_exchanged_for_what_hydra_makes_of_it(experiment: str) -> None:
    words, root = [f"experiment={experiment}"], Path(str(files("conf")))
    composition = made(words)
    for file in sorted(root.glob("*/*.yaml")):
        option = f"{file.parent.name}={file.stem}"
        try:
            found = composition.of([option])
        except MissingMandatoryValue:
            continue  # which must be given, or the option is of no use
        whole = compose("config", overrides=[*words, option])
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(whole), option


# -- the command that repeats a run that a study made up -------------------------------------------


def configured(*words: str) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(compose("config", overrides=[*words]), resolve=True)
    return dict(plain)


def test_the_command_of_a_run_composes_what_the_study_set(tmp_path: Path) -> None:
    """Bounds of a client, below a key that holds nothing unless it is filled."""
    words = ("experiment=single", "workload=chat_and_batch")
    own = ("workload.rate=3", "+slo.clients.batch.e2e=9", "slo.ttft=1")
    made = configured(*words, *own)
    typed = single(command(tmp_path, *words), [], Job("a", 0, made, tmp_path))
    again = configured(*shlex.split(typed.partition("pagedsim ")[2]))
    assert again["slo"] == {**made["slo"], "clients": {"batch": {"e2e": 9}}}
    assert again["workload"] == made["workload"]


# -- kinds of settings: what a study is given by hand is what its fields say -----------------------


@dataclass(frozen=True)
class Study:
    """One field of each kind."""

    rate: float = 1.0
    count: int = 1
    name: str = "x"
    sizes: Sequence[int] = (1, 2)
    arms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    loads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variants: Mapping[str, float] | None = None
    anything: Any = None
    maker: object = None

    def __post_init__(self) -> None:
        require_kinds(self)


def test_settings_of_their_kind() -> None:
    Study(rate=2, sizes=[], arms={"a": []}, loads={"b": {"c": 1}}, variants={"d": 1}, anything="x")
    Study(variants=None, maker=3)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rate": "x"}, "^rate='x': must be a number$"),
        ({"count": 1.5}, "^count=1.5: must be a whole number$"),
        ({"name": 5}, "^name=5: must be a text$"),
        ({"sizes": "16"}, "^sizes='16': must be a list$"),
        ({"arms": [1]}, r"^arms=\[1\]: must be a mapping of names to settings$"),
        ({"arms": {"a": [3]}}, "^arms.a=3: must be a text$"),
        ({"loads": {"a": 3}}, "^loads.a=3: must be a mapping of names to settings$"),
        ({"variants": {"a": None}}, "^variants.a=None: must be a number$"),
    ],
)
def test_settings_of_another_kind(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Study(**settings)
