"""What tests of several rooms share."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from pagedsim.__main__ import main

if TYPE_CHECKING:
    from pagedsim.engine.models import LoadedModel
    from tests.run.http.fake import Fake

# Small models are faster on one thread, and steadier; workers and processes share the cores anyway.
# Set before torch is imported, and inherited to every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

# Number of examples that Hypothesis draws: few, always the same. HYPOTHESIS_PROFILE=soak draws new
# ones each time, to search further. Tests with expensive or cheap examples take a part of these
# numbers or a multiple.
EXAMPLES = {"quick": 50, "soak": 5000}
for profile, examples in EXAMPLES.items():
    settings.register_profile(
        profile,
        max_examples=examples,
        derandomize=profile != "soak",
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

Call = Callable[..., tuple[int, str, str]]

if find_spec("torch") is None:  # an installation without the extra engine
    collect_ignore = [
        *("engine", "kernels", "run/test_engine_runs.py", "experiments/test_tracked.py"),
        *("serve/test_sim_output.py", "serve/test_tokens_over_http.py"),
    ]


# Most of what is imported and collected stays, and a quarter of that time would go into looking for
# garbage in it.
gc.disable()


SAMPLED = {
    "test_the_answer_names_what_is_wrong": 10,
    "test_no_experiment_is_noted": 5,
    "test_a_request_that_fails_leaves_no_cycle": 5,
    "test_a_recorded_study_calls_nothing_that_is_no_part": 4,
    "test_what_another_seed_changes_is_drawn": 4,
    "test_a_command_ends_with_its_table": 3,
    "test_an_example_runs": 3,
    "test_fast_forwarded_steps_are_those_that_are_planned": 3,
    "test_the_first_broken_promise_is_named": 3,
    "test_the_policies_of_pagedsim_keep_their_promises": 3,
    "test_the_routers_of_pagedsim_keep_their_promises": 3,
    "test_waits_are_those_of_theory": 3,
    "test_what_a_page_chooses_runs_and_changes_something": 3,
    "test_a_number_is_one_fact": 3,
    "test_every_option_builds": 3,
    "test_a_call_leaves_no_objects_behind": 2,
    "test_a_policy_decides_as_its_reference": 2,
    "test_a_reduced_study_finds_the_numbers_of_the_reference": 2,
    "test_any_configuration": 2,
    "test_chunks_and_a_prefix_cache_change_no_token": 2,
    "test_every_kind_of_study_is_drawn": 2,
    "test_every_step_is_decided_as_vllm_did": 2,
    "test_every_step_is_decided_as_sglang_did": 2,
    "test_greedy_tokens": 2,
    "test_invariants_hold": 2,
    "test_invariants_hold_ahead": 2,
    "test_random_workloads_match_the_oracle": 2,
    "test_sglang_plans_the_same": 2,
    "test_the_simulator_plans_what_the_engine_planned": 2,
    "test_what_a_setting_may_be": 2,
}
"""Of the cases of these tests one in so many is quick, and the others are slow: the quick tests end
within five minutes on two cores."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow cases of `SAMPLED` tests, before slow ones are deselected."""
    seen: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        every = SAMPLED.get(test.rpartition("::")[2])
        if every and not item.get_closest_marker("slow"):
            if seen[test] % every:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: no collection goes through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def garbage_goes() -> Iterator[None]:
    """The command would keep its garbage for good, as a process does that is about to end."""
    import pagedsim.__main__ as command

    kept = SimpleNamespace(set_threshold=lambda *_: None, freeze=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "gc", kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """The files of `conf` are parsed once a process, and the same of its options composed once."""
    from hydra.core.plugins import Plugins

    from pagedsim.spec.conf import Conf, copied

    Plugins.instance()  # runs the module below once more, which makes another class of its name
    from hydra._internal.core_plugins.importlib_resources_config_source import (
        ImportlibResourcesConfigSource as Source,
    )

    read: Callable[..., Any] = Source._read_config
    compose: Callable[..., Any] = Conf.compose
    there: dict[tuple[str, ...], Any] = {}

    def known(self: Source, file: Any) -> Any:
        key = (self.path, self.provider, str(file))
        if key not in there:
            there[key] = read(self, file)
        return deepcopy(there[key])  # Hydra takes the list of defaults out of what it gets

    def composed(self: Conf, words: Sequence[str]) -> Any:
        if self.folders[1:] or any(self._offered.values()):  # of a user, or of plugins
            return compose(self, words)
        key = ("composed", self.root, *words)
        if key not in there:
            there[key] = compose(self, words)
        return tuple(copied(there[key]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "_read_config", known)
        patch.setattr(Conf, "compose", composed)
        yield


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes once more to read `hydra.mode`, which no command here sets."""
    from hydra._internal.hydra import Hydra

    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)


@pytest.fixture
def call(
    composed_once: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """Run the command in this process, in an empty folder: exit code, stdout, stderr."""
    from pagedsim.run.multirun import Multirun

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Multirun, "folder", None)  # a process of its own has had no sweep

    def called(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pagedsim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return called


@pytest.fixture
def hydra() -> Iterator[None]:
    """Configurations can be composed."""
    from hydra import initialize_config_module

    from pagedsim.spec.conf import register

    register()
    with initialize_config_module("pagedsim.conf", version_base="1.3"):
        yield


@pytest.fixture
def a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines share one small model and wait for no machine: no time matters to these tests."""
    from pagedsim.backends import engine as serving
    from pagedsim.backends.engine import ModelCache
    from pagedsim.engine import assemble

    def load(*_: object, max_model_len: int | None = None, **__: object) -> LoadedModel:
        return replace(_small(), max_model_len=max_model_len or _small().max_model_len)

    monkeypatch.setattr(assemble, "load_model", load)
    monkeypatch.setattr(serving, "CACHE", ModelCache())
    monkeypatch.setattr(serving, "the_machine", nullcontext)


@cache
def _small() -> LoadedModel:
    from pagedsim.engine.models import load_model
    from tests.engine.architectures import fresh

    return load_model(fresh("llama"))


@pytest.fixture
def fake() -> Iterator[Fake]:
    """A server that speaks as OpenAI's does; a test may change what it does."""
    pytest.importorskip("aiohttp")
    from tests.run.http.fake import Fake, serving

    with serving(Fake()) as there:
        yield there


@pytest.fixture
def registries() -> Iterator[None]:
    """Metrics and plots that a test registers are gone after it."""
    from pagedsim.metrics.definitions import METRICS
    from pagedsim.report.plots import PLOTS

    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (registry, dict(registry)) for registry in (METRICS, PLOTS)
    ]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)
