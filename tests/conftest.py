"""What tests of several rooms share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
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
    """The files of `conf` are parsed once a process, not once a composition."""
    from hydra.core.plugins import Plugins

    Plugins.instance()  # runs the module below once more, which makes another class of its name
    from hydra._internal.core_plugins.importlib_resources_config_source import (
        ImportlibResourcesConfigSource as Source,
    )

    read: Callable[..., Any] = Source._read_config
    there: dict[tuple[str, ...], Any] = {}

    def known(self: Source, file: Any) -> Any:
        key = (self.path, self.provider, str(file))
        if key not in there:
            there[key] = read(self, file)
        return deepcopy(there[key])  # Hydra takes the list of defaults out of what it gets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "_read_config", known)
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
