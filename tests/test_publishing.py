"""What a published repository has beside the package: a citation, a container, forms for issues."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import pagedsim

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_citation_is_of_this_package() -> None:
    assert CITATION["version"] == pagedsim.__version__
    assert CITATION["license"] == PROJECT["license"]
    assert CITATION["title"].startswith(f"{PROJECT['name']}: ")
    assert set(CITATION["keywords"]) < set(PROJECT["keywords"])


# -- the container ---------------------------------------------------------------------------------


def entry_points() -> dict[str, list[str]]:
    """The command of each stage that has one."""
    found: dict[str, list[str]] = {}
    stage = ""
    for line in DOCKERFILE.splitlines():
        if named := re.match(r"FROM \S+ AS (\w+)", line):
            stage = named[1]
        elif line.startswith("ENTRYPOINT "):
            found[stage] = json.loads(line.removeprefix("ENTRYPOINT "))
    return found


def test_the_last_stage_is_the_simulator() -> None:
    assert list(entry_points()) == ["engine", "sim"]


@pytest.mark.parametrize(("stage", "words"), entry_points().items())
def test_a_container_s_command_is_a_server(
    stage: str, words: list[str], call: Callable[..., tuple[int, str, str]]
) -> None:
    assert words[0] in PROJECT["scripts"]
    code, shown, errors = call(*words[1:], "--cfg", "job")
    assert (code, errors) == (0, "")
    config = yaml.safe_load(shown)
    assert config["host"] == "0.0.0.0"
    assert stage == ("sim" if "Simulated" in config["backend"]["_target_"] else "engine")
    [extras] = re.findall(rf"AS {stage}\n(?:.+\n)*?RUN pip install .*'\.\[(.+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    port = config["port"]
    assert f"EXPOSE {port}\n" in DOCKERFILE
    assert f"http://127.0.0.1:{port}/health" in DOCKERFILE


def test_a_container_serves_without_rights() -> None:
    for stage in DOCKERFILE.split("\nFROM ")[1:]:
        assert stage.startswith("python") or "\nUSER pagedsim\n" in stage


def test_what_the_container_copies_is_there_and_sent_to_the_builder() -> None:
    copied = [
        word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M) for word in line.split()
    ]
    assert [one for one in copied if not (ROOT / one).exists()] == []
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.M)
    assert sorted(sent) == sorted(copied)


# -- wheels ----------------------------------------------------------------------------------------


def test_compiled_wheels_are_of_pythons_that_the_package_takes() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert tool["environment"] == {"PAGEDSIM_COMPILE": "1"}
    oldest = PROJECT["requires-python"].removeprefix(">=").replace(".", "")
    assert tool["build"][0] == f"cp{oldest}-*"
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
    assert set(jobs) == {"pure", "compiled"}
    assert "PAGEDSIM_COMPILE=0 python -m build" in jobs["pure"]["steps"][-2]["run"]


# -- issues ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", [one for one in FORMS if one.name != "config.yml"], ids=lambda form: form.stem
)
def test_a_form_asks_for_what_reproduces_a_run(form: Path) -> None:
    fields = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(fields)
    ids = [field["id"] for field in fields["body"]]
    assert len(set(ids)) == len(ids)
    text = form.read_text(encoding="utf-8")
    for needed in ("`pagedsim --version`", "command", "config.yaml"):
        assert needed in text
