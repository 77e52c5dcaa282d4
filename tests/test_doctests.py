"""The examples in docstrings, tried."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

import pagedsim
import policies

ENGINE = ("pagedsim.engine", "pagedsim.__main__")


def modules() -> list[str]:
    found = [
        module.name
        for package in (pagedsim, policies)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not module.name.startswith(ENGINE)
    ]
    return [name for name in found if ">>>" in _source(name)]


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec
    assert spec.origin
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed
