"""Libraries that are too old: one line at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from pagedsim import requirements
from pagedsim.core import ConfigError
from pagedsim.requirements import refuse_older
from tests import bounds

STATED = [
    "hydra-core>=1.3.2",
    "rich>=13",
    "mkdocstrings[python]>=0.26; extra == 'docs'",
    "optuna>=4.1; extra == 'tune'",
    'triton>=3.5; (platform_system == "Linux") and extra == "engine"',
    "plain",
]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What is installed, by name."""
    found = {"hydra-core": "1.3.2", "rich": "13.0.0", "mkdocstrings": "0.26.0"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(requirements, "requires", lambda name: STATED)
    monkeypatch.setattr(requirements, "version", version)
    refuse_older.cache_clear()
    yield found
    refuse_older.cache_clear()


def test_what_is_new_enough_or_missing_passes(there: dict[str, str]) -> None:
    for extra in ("", "docs", "tune", "engine", "other"):
        refuse_older(extra)


@pytest.mark.parametrize(
    ("name", "old", "extra", "bound"),
    [
        ("hydra-core", "1.3.1", "", "1.3.2"),
        ("rich", "12.6.0", "", "13"),
        ("mkdocstrings", "0.9", "docs", "0.26"),
        ("optuna", "4.0.0", "tune", "4.1"),
        ("triton", "3.4.0+git1", "engine", "3.5"),
    ],
)
def test_what_is_older_is_named(
    name: str, old: str, extra: str, bound: str, there: dict[str, str]
) -> None:
    there[name] = old
    with pytest.raises(ConfigError) as caught:
        refuse_older(extra)
    assert str(caught.value) == (
        f"older than pagedsim needs: {name} {old} (at least {bound}): "
        f"pip install --upgrade '{name}>={bound}'"
    )
    for other in {"", "docs", "tune", "engine"} - {extra}:
        refuse_older(other)


@pytest.mark.parametrize("extra", bounds.EXTRAS)
def test_a_command_that_needs_an_extra_says_so(
    extra: str, there: dict[str, str], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if extra in ("engine", "gguf"):
        pytest.importorskip("torch")
    library = next(one for one in bounds.libraries() if one.extra == extra)
    stated = f"{library.name}>={library.bound}" + (f"; extra == '{extra}'" if extra else "")
    monkeypatch.setattr(requirements, "requires", lambda name: [stated])
    there[library.name] = "0.1"
    code, out, errors = call(*bounds.STARTS[extra][1:])
    assert (code, out) == (1, "")
    said = f"older than pagedsim needs: {library.name} 0.1 (at least {library.bound})"
    assert errors.splitlines()[-1].startswith(f"pagedsim: {said}: ")
