"""Configurations: the base that Hydra composes, and arms as patches of it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pagedsim.core import ConfigError, Policy
from pagedsim.policies.ordering import FCFS
from pagedsim.spec.check import check_settings
from pagedsim.spec.composed import Composed, assembled
from pagedsim.spec.conf import Conf
from pagedsim.spec.given import Given
from pagedsim.spec.objects import make
from pagedsim.spec.study import StudySpec, single
from pagedsim.spec.words import Change, parse, text_of
from tests.run.studies import command, compose

CONF = Conf()

# -- the base, and arms as patches of it ----------------------------------------------------------

QUICK = {
    *("experiment=migration", "experiment=parity", "experiment=truth", "policy=vtc"),
    *("server=sglang-0.5", "server=vllm-0.33", "workload=mooncake", "memory=radix"),
    *("hardware=h100", "fleet=prefill_decode", "backend=engine"),
}
"""Hydra takes a tenth of a second for each."""


def slow_but(words: Sequence[str]) -> list[Any]:
    """Cases of which all but a few are slow."""
    return [pytest.param(w, marks=() if w in QUICK else pytest.mark.slow) for w in words]


BASES = [f"experiment={name}" for name in CONF.options_of("experiment")]
EVERY = [
    f"{group}={option}"
    for group in CONF.groups
    if group not in ("experiment", "scale")
    for option in CONF.options_of(group)
]
KEYS = ["server.max_seqs=3", "++slo.ttft=1", "+workload.x={a: 1}"]


@pytest.mark.parametrize("base", slow_but(BASES))
def test_options_are_merged_as_hydra_merges_them(base: str) -> None:
    """What a patch assembles of files is the base that Hydra composes, in the same order."""
    for words in ([base], [base, "server=vllm-0.33"], [base, "backend=engine", "workload=trace"]):
        composed = Composed.of(words, CONF)
        assert json.dumps(assembled(CONF, composed.choices)) == json.dumps(composed.tree)


@pytest.mark.parametrize("word", slow_but(EVERY))
def test_an_arm_has_the_configuration_of_its_words_typed(word: str) -> None:
    typed = Composed.of(["experiment=migration", *KEYS, word, "seed=2"], CONF)
    patched = Composed.of(["experiment=migration", *KEYS], CONF).changed([word, "seed=2"])
    assert patched.tree == typed.tree
    assert patched.choices == typed.choices


SINGLE = Composed.of(["experiment=single"], CONF)


@pytest.mark.parametrize(
    ("typed", "patch"),
    [
        ((), ("server.max_seqs=3",)),
        (("backend=engine", "scale=null"), ("policy=sjf",)),
        (("memory=prefix",), ("memory.eviction=lfu", "workload=prefix_routing")),
        (("policy._target_=tests.run.parts.A", "+policy.x=1"), ("policy._target_=b.B",)),
        (("policy._target_=tests.run.parts.A", "+policy.x=1"), ("memory=prefix", "policy=sjf")),
    ],
)
def test_words_of_a_patch_are_as_typed_after_those_of_the_base(
    typed: Sequence[str], patch: Sequence[str]
) -> None:
    together = Composed.of(["experiment=single", *typed, *patch], CONF)
    patched = Composed.of(["experiment=single", *typed], CONF).changed(patch)
    assert (patched.tree, patched.choices) == (together.tree, together.choices)


def test_a_patch_changes_neither_the_option_nor_what_an_interpolation_names() -> None:
    SINGLE.changed(["workload=prefix_routing", "workload.stages.0.rate=99"])
    assert SINGLE.changed(["workload=prefix_routing"]).tree["workload"]["stages"][0]["rate"] != 99
    composed = Composed.of(["experiment=swap_vs_recompute"], CONF)
    assert composed.changed(["+study.backend.x=5"]).tree["backend"] == composed.tree["backend"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("study:\n  rate: 1\n bad: 2\n", r"mine\.yaml: cannot be read: line 4, column 2"),
        (
            "defaults: [override /hardware: h10]",
            r"mine\.yaml: defaults: hardware=h10: unknown; did",
        ),
        ("defaults: [override /modl: x]", r"mine\.yaml: defaults: override /modl: no such group"),
        ("defaults: [/hardware: h100]", r"mine\.yaml: defaults: /hardware: is chosen already"),
        ("study: {}", "experiment=mine: the first line of its file must be # @package _global_"),
    ],
)
def test_a_file_of_ones_own_is_named_in_errors(text: str, message: str, tmp_path: Path) -> None:
    first = "" if text == "study: {}" else "# @package _global_\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(first + text)
    with pytest.raises(ConfigError, match=message):
        Composed.of(["experiment=mine"], Conf([tmp_path]))


def test_an_object_takes_no_settings_of_its_class() -> None:
    with pytest.raises(ConfigError, match=r"policy\.x=3: is not taken by an object of FCFS"):
        make("policy", {"_target_": Given(FCFS()), "x": 3}, Policy)


@pytest.mark.parametrize("text", ["${oc.select:server.max_seqs,7}", "${server[max_seqs]}"])
def test_an_interpolation_may_read_any_group(text: str) -> None:
    assert SINGLE.changed([f"memory.blocks={text}"]).resolved()["memory"]["blocks"] == 256


def test_arms_of_a_root_of_ones_own_are_composed_in_its_order(tmp_path: Path) -> None:
    root = "defaults: [config, _self_]\nworkload: {rate: 3}\n"
    (tmp_path / "mine.yaml").write_text(root)
    conf = Conf([tmp_path], "mine")
    spec = StudySpec.of(["experiment=single"], tmp_path, conf)
    for patch in ("policy.victim=last", "memory=prefix"):
        assert spec.configured("", [patch])["workload"]["rate"] == 3
    assert shlex.split(spec.line())[3:] == [
        *("--config-dir", str(tmp_path), "--config-name", "mine", "experiment=single")
    ]


@pytest.mark.parametrize(
    "value",
    [
        *("1", "+5", "-3", "1_000", "1e3", ".5", "1.", "nan", "-inf", "007", "1e", "True", "NULL"),
        *("", "a b  c", " x ", "a:b", "a/b-c.d", "10%", "${x.y}", "pre${x}post", "a\\,b"),
        *("'it'", '"a=b"', "'q\\'x'", "'a\\\\'", "[]", "{}", "[a, [b, {c: d}]]", "float(3)"),
        *("{a: 1, b: [x, y], c: {d: e}}", "{a b: 1}", "{a: b:c}"),
    ],
)
def test_a_value_is_what_hydra_reads_and_is_typed_as_it_is_read(value: str) -> None:
    theirs = OverridesParser.create().parse_override(f"a.b={value}").value()
    assert repr(parse(f"a.b={value}").value) == repr(theirs)
    assert repr(parse(f"a.b={text_of(theirs)}").value).lower() == repr(theirs).lower()


def test_what_a_script_gives_goes_where_it_is_put() -> None:
    """Objects and mappings of Python are never texts on the way."""
    thing = Given(object())
    given = [Change("policy.x", thing, "add"), Change("fleet.pools", {"a": {}})]
    composed = Composed.of(["experiment=single", *given], CONF)
    assert composed.resolved(missing=True)["policy"]["x"] is thing
    again = composed.changed([Change("workload.lengths", {"shape": "fixed"}, "replace")])
    assert again.resolved(missing=True)["workload"]["lengths"] == {"shape": "fixed"}
    assert composed.tree["workload"]["lengths"] != {"shape": "fixed"}


def test_an_arm_may_choose_what_the_command_line_chooses() -> None:
    """The experiment's settings of another workload stay left out."""
    base = Composed.of(["experiment=kv_tiers", "workload=trace", "workload.path=a.csv"], CONF)
    assert base.changed(["workload=trace"]).tree == base.tree
    assert base.tree["workload"]["rate"] is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [", "cannot be read: line 2, column"),
        ("[1]", "must be a mapping of settings"),
        ("defaults:", "defaults: must be a list of options"),
        ("defaults: priority", "defaults: must be a list of options"),
        ("defaults: [vtc@here]", "policy=vtc@here: unknown; "),
        (
            "defaults: [{override /nosuch: y}]",
            "policy/mine.yaml: defaults: override /nosuch: no such group here; choose from ",
        ),
    ],
)
def test_a_file_that_is_no_option_is_named(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(fault)):
        Conf([tmp_path]).option("policy", "mine")


SERVERS = {
    "vllm-0.6": ("PrefillFirst", "PagedMemory", "vllm-0.6", False),
    "vllm-0.12": ("Unified", "PrefixMemory", "vllm-0.12", False),
    "vllm-0.33": ("Unified", "PrefixMemory", "vllm-0.33", True),
    "sglang-0.5": ("SGLang", "RadixMemory", "sglang-0.5", True),
    "trtllm-1": ("TensorRTLLM", "PagedMemory", "trtllm-1.1", True),
}


@pytest.mark.parametrize("server", CONF.options_of("server"))
def test_a_server_goes_before_an_experiment_and_behind_the_command_line(server: str) -> None:
    words = ["experiment=fairness", f"server={server}"]
    of_all = compose("config", words)
    classes = [of_all[group]["_target_"].rpartition(".")[2] for group in ("batching", "memory")]
    asynchronous = of_all.server.async_scheduling
    assert (*classes, of_all.stack.name, asynchronous) == SERVERS[server]
    typed = ["batching=static", "memory=paged", "policy=vtc", "stack=ideal", "server.max_seqs=3"]
    more = compose("config", [*words, *typed])
    assert (more.server.max_seqs, more.batching._target_) == (3, "pagedsim.core.Static")
    assert compose("config", ["experiment=fairness", *typed]).batching == more.batching


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
    made = compose("config", [f"hardware={hardware}", "server=vllm-0.33"]).server
    assert (made.max_seqs, made.max_batched_tokens) == vllm
    batching = compose("config", [f"hardware={hardware}", "batching=sglang"])
    assert batching.batching.chunked_prefill_size == chunk


def test_a_folder_of_ones_own_has_further_options(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/mine.yaml").write_text("defaults: [priority]\nextra: 1\n")

    def own(*words: str) -> dict[str, Any]:
        return Composed.of(words, Conf([tmp_path])).tree

    assert own("policy=mine")["policy"]["extra"] == 1
    assert {"mine", "vtc", "fcfs"} <= set(Conf([tmp_path]).options_of("policy"))
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload/mine.yaml").write_text(
        "# @package _global_\ndefaults: [/workload/fixed]\n"
    )
    assert own("workload=mine")["workload"] == own("workload=fixed")["workload"]
    patched = Composed.of([], Conf([tmp_path])).changed(["workload=mine"])
    assert patched.tree["workload"] == own("workload=fixed")["workload"]
    (tmp_path / "hollow/sub").mkdir(parents=True)
    (tmp_path / "hollow/sub/a.yaml").write_text("x: 1\n")
    for word, text in (
        ("+hollow=x", "hollow=x: unknown; it has no options"),
        ("+hollow/sub=a", "hollow: no such key; choose from backend, "),
    ):
        with pytest.raises(ConfigError, match=text):
            Composed.of([word], Conf([tmp_path])).resolved(missing=True)


# -- the configurations of arms --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["server=sglang-0.5"], True),
        (["memory=radix"], True),
        (["memory=prefix", "memory.eviction=lfu"], False),
        (["server=vllm-0.33"], False),
        (["server=sglang-0.5", "memory.blocks=32000"], False),
        (["server=sglang-0.5", "memory.block_size=16"], False),
    ],
)
def test_blocks_of_an_experiment_that_are_others_are_noted(words: list[str], noted: bool) -> None:
    notes = StudySpec.of(["experiment=policy_zoo", *words], Path(), CONF).notes
    assert (
        any("sets memory.blocks=2000, with blocks of 16 tokens" in note for note in notes) is noted
    )


def test_an_arm_may_take_back_what_its_server_sets(tmp_path: Path) -> None:
    asked = command(tmp_path)
    plain = asked.configured("a", [])
    own = asked.configured("b", ["server=vllm-0.33", "memory=paged"])
    assert own["memory"] == {**plain["memory"], "pool": "vllm-0.33"}  # which is of the server
    assert own["batching"] != plain["batching"]


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
    return Composed.of(words, CONF).resolved(missing=True)


def test_what_a_study_set_itself_is_typed_so_that_it_can_be_composed(tmp_path: Path) -> None:
    """Bounds of a client, below a key that holds nothing unless it is filled."""
    words = ("experiment=single", "workload=chat_and_batch")
    own = ("workload.rate=3", "+slo.clients.batch.e2e=9", "slo.ttft=1")
    made = configured(*words, *own)
    typed = single(command(tmp_path, *words), [], 0, made)
    again = configured(*shlex.split(typed.partition("pagedsim ")[2]))
    assert again["slo"] == {**made["slo"], "clients": {"batch": {"e2e": 9}}}
    assert again["workload"] == made["workload"]


def test_of_what_was_typed_a_run_s_command_leaves_out_what_is_the_study_s(tmp_path: Path) -> None:
    asked = command(tmp_path, "seeds=3", "+study.note=x", "workload=alpaca", "policy=vtc")
    config = asked.configured("a", ["server.max_seqs=9"])
    assert single(asked, ["server.max_seqs=9"], 7, config) == (
        "python -m pagedsim experiment=single workload=alpaca policy=vtc server.max_seqs=9 seed=7 "
        "seeds=1"
    )


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
        check_settings(self)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rate": "x"}, "^rate='x': must be a number$"),
        ({"rate": None}, "^rate=null: must be a number$"),
        ({"rate": float("nan")}, "^rate=nan: must be a number$"),
        ({"count": 1.5}, "^count=1.5: must be a whole number$"),
        ({"count": True}, "^count=True: must be a whole number$"),
        ({"name": 5}, "^name=5: must be a text$"),
        ({"sizes": 5}, "^sizes=5: must be a list$"),
        ({"sizes": "16"}, "^sizes='16': must be a list$"),
        ({"sizes": [1, "x"]}, "^sizes='x': must be a whole number$"),
        ({"arms": [1]}, r"^arms=\[1\]: must be a mapping of names to settings$"),
        ({"arms": {"a": 3}}, "^arms.a=3: must be a list$"),
        ({"arms": {"a": [3]}}, "^arms.a=3: must be a text$"),
        ({"loads": {"a": 3}}, "^loads.a=3: must be a mapping of names to settings$"),
        ({"variants": 5}, "^variants=5: must be a mapping of names to settings$"),
        ({"variants": {"a": None}}, "^variants.a=null: must be a number$"),
    ],
)
def test_what_does_not_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Study(**settings)
