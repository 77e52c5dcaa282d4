"""`python -m pagedsim serve` as a command: its manual page, and a line for what cannot be."""

from __future__ import annotations

import re
import socket
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from pagedsim.spec.roots import Serve

pytest.importorskip("fastapi")

from pagedsim.serve.factory import client_name
from tests.conftest import Call

GROUPS = ("policy", "preemption", "batching", "memory", "model", "hardware", "cost", "backend")


# -- the manual page -------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("serve", "-h"), ("--help", "serve")])
def test_help_is_a_manual_page_of_the_server(call: Call, words: tuple[str, ...]) -> None:
    code, page, errors = call(*words)
    assert (code, errors) == (0, "")
    assert max(map(len, page.splitlines())) <= 96
    assert "serve a model over HTTP" in page
    assert "$" not in page


def test_every_key_of_the_schema_is_on_the_page(call: Call) -> None:
    _, page, _ = call("serve", "--help")
    settings = {key.split(".")[0] for key in re.findall(r"^    ([a-z_.]+)=", page, re.MULTILINE)}
    groups = set(re.findall(r"^  ([a-z]+)  ", page, re.MULTILINE))
    assert settings | groups >= {field.name for field in fields(Serve)}
    assert groups >= set(GROUPS)
    for group in GROUPS:  # each with its default marked
        assert re.search(rf"^  {group} .*\n( +.*\n)*?.*\*", page, re.MULTILINE), group


# -- names that clients see -----------------------------------------------------------------------


def test_a_file_or_folder_is_called_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert client_name(f"{tmp_path}/model.gguf") == "model.gguf"
    assert client_name(f"{tmp_path}/") == tmp_path.name
    assert client_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"


# -- what is wrong ---------------------------------------------------------------------------------


def test_a_taken_port_is_refused_before_anything_is_loaded(call: Call) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, errors = call("serve", f"port={port}")
    assert (code, errors) == (
        1,
        f"pagedsim: host=127.0.0.1, port={port}: cannot listen: Address already in use\n",
    )


def test_an_empty_key_in_the_environment_is_refused_too(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDSIM_API_KEY", "")
    line = "PAGEDSIM_API_KEY='': must not be empty; without a key leave it away"
    assert call("serve", "port=0") == (1, "", f"pagedsim: {line}\n")


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Imports of the server find no such package."""
    there = dict(sys.modules)
    for name in there:
        if name.startswith("pagedsim.serve.") and name != "pagedsim.serve.command":
            parent, _, child = name.rpartition(".")
            monkeypatch.setattr(there[parent], child, there[name], raising=False)
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_a_missing_package_names_the_command_that_installs_it(
    call: Call, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    hide(monkeypatch, missing)
    code, _, errors = call("serve", "port=0")
    assert code == 1
    assert errors == (
        f"pagedsim: serve: needs {missing}, which is not installed: "
        "pip install -c constraints.txt '.[serve]'\n"
    )


def test_where_both_extras_are_missing_one_command_installs_both(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "fastapi")
    monkeypatch.setattr("pagedsim.serve.command.find_spec", lambda name: None)
    assert call("serve", "port=0", "backend=engine")[2] == (
        "pagedsim: serve backend=engine: needs fastapi and torch, which are not installed: "
        "pip install -c constraints.txt '.[engine,serve]'\n"
    )
