"""Compositions: arms and rounds have the configuration that Hydra composes of all words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict

from pagedsim.core import ConfigError
from pagedsim.options import Options
from pagedsim.overrides import parse
from pagedsim.run.compose import Composition, single
from pagedsim.run.job import Job
from tests.run.studies import command

# -- what is composed here is what Hydra composes -------------------------------------------------

pytestmark = pytest.mark.usefixtures("hydra")
CONF = Path(str(files("pagedsim.conf")))
MORE = [
    *("workload=mooncake", "policy=vtc", "hardware=h100", "workload.rate=3", "server.max_seqs=3"),
    *("+workload.x={a: 1}", "+workload.x={b: [x, 2]}", "++slo.ttft=1", "~study.question"),
]


def by_hydra(words: Sequence[str]) -> tuple[str, list[tuple[str, str | None]]]:
    whole = compose("config", overrides=[*words], return_hydra_config=True)
    choices = {str(group): option for group, option in whole.hydra.runtime.choices.items()}
    with open_dict(whole):
        del whole["hydra"]
    return OmegaConf.to_yaml(whole), [one for one in choices.items() if one[0][:6] != "hydra/"]


@pytest.mark.parametrize(
    "words",
    [
        ["policy=priority", "model=opt-13b", "policy.displace=true"],
        ["experiment=fairness", "policy=priority"],  # has its own settings of the policy
        ["experiment=truth", "backend=engine"],  # an option of `scale` goes by it
        ["experiment=single", "fleet=prefill_decode", "server.max_seqs=${memory.block_size}"],
        ["experiment=migration", *MORE],
        ["experiment=fairness", "server=sglang-0.5", "policy=vtc", "server.max_seqs=3"],
        ["~server", "~memory"],
        ["memory={block_size: 8}", "+workload={name: x}"],  # a group's settings, no option
        ["~predictor", "+workload.name='a, b'", "cost=blis-llama-3.1-8b-tp2"],
    ],
    ids=" ".join,
)
def test_composed_as_by_hydra(words: list[str]) -> None:
    made = Options().compose("config", words)
    assert (OmegaConf.to_yaml(made.config), list(made.choices.items())) == by_hydra(words)


EVERY = {
    folder.name: [f"{folder.name}={file.stem}" for file in sorted(folder.glob("*.yaml"))]
    for folder in sorted(CONF.iterdir())
    if folder.is_dir()
}
"""The options of each group."""
TOGETHER = zip_longest(*(EVERY[group] for group in EVERY if group != "experiment"))
"""One option of each group at a time, while it has more: Hydra takes long to compose."""
ROWS = [[word for word in row if word] for row in TOGETHER]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [*ROWS, *([one, *MORE] for one in EVERY["experiment"])], ids=lambda words: words[0]
)
def test_every_option_is_composed_as_by_hydra(words: list[str]) -> None:
    made = Options().compose("config", words)
    assert (OmegaConf.to_yaml(made.config), list(made.choices.items())) == by_hydra(words)


@pytest.mark.parametrize(
    "value",
    [
        *("1", "+5", "-3", "1_000", "1e3", ".5", "1.", "nan", "-inf", "007", "1e", "True", "NULL"),
        *("", "a b  c", " x ", "a:b", "~/x", "a/b-c.d", "10%", "${x.y}", "pre${x}post", "a\\,b"),
        *("'it'", '"a=b"', "'q\\'x'", "'a\\\\'", "[]", "{}", "[a, [b, {c: d}]]", "[1 2]"),
        *("{a: 1, b: [x, y], c: {d: e}}", "{a b: 1}", "{1: 2, true: 3, null: 4}", "{a: b:c}"),
        *("[", "a,b", "f(1)", "x=1", "[1, 2,]", "{a}", "'a' b", "#x", "${", "a;b"),
    ],
)
def test_a_value_is_read_as_by_hydra(value: str) -> None:
    word = f"a.b={value}"
    try:
        theirs = OverridesParser.create().parse_override(word)
    except HydraException:
        theirs = None
    if theirs is None or theirs.is_sweep_override() or "(" in value:
        with pytest.raises(ConfigError, match=re.escape(word)):
            parse(word)
    else:
        assert repr(parse(word).value) == repr(theirs.value())


def test_an_arm_may_choose_what_the_command_line_chooses() -> None:
    """The experiment's settings of another workload stay left out."""
    made = Composition(["experiment=kv_tiers", "workload=trace", "workload.path=a.csv"])
    assert made.of(["workload=trace"]) == made.of([])
    assert made.of([]).workload.rate is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [", "cannot be read: while parsing"),
        ("[1]", "must be a mapping of settings"),
        ("defaults:", "defaults: must be a list of options"),
        ("defaults: priority", "defaults: must be a list of options"),
        ("defaults: [vtc@here]", "vtc@here: packages are not supported"),
        (
            "defaults: [{override /nosuch: y}]",
            "policy/mine.yaml: defaults: override /nosuch: y: no such group here; choose from ",
        ),
    ],
)
def test_a_file_that_is_no_option_is_named(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(fault)):
        Options([tmp_path, files("pagedsim.conf")]).compose("config", ["policy=mine"])


SERVERS = {
    "vllm-0.6": ("PrefillFirst", "PagedMemory", "vllm-2024", False),
    "vllm-0.33": ("Unified", "PrefixMemory", "vllm-2026", True),
    "sglang-0.5": ("SGLang", "RadixMemory", "vllm-2026", True),
}


@pytest.mark.parametrize("server", Options().options_of("server"))
def test_a_server_goes_before_an_experiment_and_behind_the_command_line(server: str) -> None:
    words = ["experiment=fairness", f"server={server}"]
    of_all = Options().compose("config", words).config
    classes = [of_all[group]["_target_"].rpartition(".")[2] for group in ("batching", "memory")]
    asynchronous = of_all.server.async_scheduling
    assert (*classes, of_all.stack.name, asynchronous) == SERVERS[server]
    typed = ["batching=static", "memory=paged", "policy=vtc", "stack=ideal", "server.max_seqs=3"]
    more = Options().compose("config", [*words, *typed]).config
    assert (more.server.max_seqs, more.batching._target_) == (3, "pagedsim.core.Static")
    assert Options().compose("config", ["experiment=fairness", *typed]).config.batching == (
        more.batching
    )


@pytest.mark.parametrize(
    ("hardware", "vllm", "chunk"),
    [
        ("a10", (256, 2048), 4096),
        ("a100-80gb", (256, 2048), 8192),
        ("h100", (1024, 8192), 8192),
        ("b200", (1024, 16384), 16384),
        ("t4", (256, 2048), 2048),
        ("cpu", (256, 2048), 2048),
    ],
)
def test_defaults_that_depend_on_the_gpu(hardware: str, vllm: tuple[int, int], chunk: int) -> None:
    made = Options().compose("config", [f"hardware={hardware}", "server=vllm-0.33"]).config.server
    assert (made.max_seqs, made.max_batched_tokens) == vllm
    batching = Options().compose("config", [f"hardware={hardware}", "batching=sglang"]).config
    assert batching.batching.chunked_prefill_size == chunk


def test_a_folder_of_ones_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/mine.yaml").write_text("defaults: [priority]\nextra: 1\n")
    (tmp_path / "policy/vtc.yaml").write_text("_target_: mine.VTC\n")
    options = Options([tmp_path, files("pagedsim.conf")])
    assert options.compose("config", ["policy=mine"]).config.policy.extra == 1
    assert options.compose("config", ["policy=vtc"]).config.policy == {"_target_": "mine.VTC"}
    assert {"mine", "vtc", "fcfs"} <= set(options.options_of("policy"))
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload/mine.yaml").write_text(
        "# @package _global_\ndefaults: [/workload/fixed]\n"
    )
    made = options.compose("config", ["workload=mine"]).config.workload
    assert made == options.compose("config", ["workload=fixed"]).config.workload
    (tmp_path / "hollow/sub").mkdir(parents=True)
    (tmp_path / "hollow/sub/a.yaml").write_text("x: 1\n")
    for word, text in (
        ("+hollow=x", "hollow=x: unknown; hollow has no options"),
        ("+hollow/sub=a", "hollow: no such key; choose from backend, "),
    ):
        with pytest.raises(ConfigError, match=text):
            options.compose("config", [word])
    (tmp_path / "root.yaml").write_text("defaults: [config, _self_]\nworkload: {rate: 7}\n")
    assert options.compose("root", ["policy=mine"]).config.workload.rate == 7


# -- the configurations of arms --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["server=sglang-0.5"], True),
        (["memory=radix"], True),
        (["memory=tiered", "memory.write=through"], False),
        (["server=vllm-0.33"], False),
        (["server=sglang-0.5", "memory.blocks=32000"], False),
        (["server=sglang-0.5", "memory.block_size=16"], False),
    ],
)
def test_blocks_of_an_experiment_that_are_others_are_noted(words: list[str], noted: bool) -> None:
    notes = Composition(["experiment=policy_zoo", *words]).notes
    assert (
        any("sets memory.blocks=2000, with blocks of 16 tokens" in note for note in notes) is noted
    )


def test_an_arm_may_take_back_what_its_server_sets(tmp_path: Path) -> None:
    asked = command(tmp_path)
    plain = asked.configured("a", [])
    own = asked.configured("b", ["server=vllm-0.33", "memory=paged"])
    assert own["memory"] == plain["memory"] and own["batching"] != plain["batching"]


def test_a_fault_is_an_arm_s_only_where_the_words_alone_have_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^workload.path: must be given"):
        command(tmp_path, "workload=trace").configured("arm a", ["seed=2"])
    for words in ((), ("workload=trace",)):
        with pytest.raises(ConfigError, match=r"^arm a: policy=nope: unknown"):
            command(tmp_path, *words).configured("arm a", ["policy=nope"])
    with pytest.raises(ConfigError, match=r"^arm a: workload.path: must be given"):
        command(tmp_path, "seed=2").configured("arm a", ["workload=trace"])


# -- the command that repeats a run that a study made up -------------------------------------------


def configured(*words: str) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(compose("config", overrides=[*words]), resolve=True)
    return dict(plain)


def test_what_a_study_set_itself_is_typed_so_that_it_can_be_composed(tmp_path: Path) -> None:
    """Bounds of a client, below a key that holds nothing unless it is filled."""
    words = ("experiment=single", "workload=chat_and_batch")
    own = ("workload.rate=3", "+slo.clients.batch.e2e=9", "slo.ttft=1")
    made = configured(*words, *own)
    typed = single(command(tmp_path, *words), [], Job("a", 0, made, tmp_path))
    again = configured(*shlex.split(typed.partition("pagedsim ")[2]))
    assert again["slo"] == {**made["slo"], "clients": {"batch": {"e2e": 9}}}
    assert again["workload"] == made["workload"]


def test_of_what_was_typed_a_run_s_command_leaves_out_what_is_the_study_s(tmp_path: Path) -> None:
    asked = command(tmp_path, "seeds=3", "+study.note=x", "workload=alpaca", "policy=vtc")
    job = Job("a", 7, asked.configured("a", ["server.max_seqs=9"]), tmp_path)
    assert single(asked, ["server.max_seqs=9"], job) == (
        "python -m pagedsim experiment=single workload=alpaca policy=vtc server.max_seqs=9 seed=7 "
        "seeds=1"
    )
