"""What an installation gets: pinned versions that fit the open ranges, and a complete wheel."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    """constraints.txt as {normalised name: version}."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalised(name): version for name, version in pairs}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_dependencies() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    return [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]


def test_constraints_pin_every_direct_dependency() -> None:
    names = {normalised(re.split(r"[^\w.-]", line)[0]) for line in direct_dependencies()}
    assert names - set(pins()) == set()


def test_one_constraints_file_serves_machines_with_and_without_a_gpu() -> None:
    # triton 3.7.1 is what torch 2.13.0's CUDA build demands; a local version such as +cpu
    # would fit one kind of machine alone.
    assert (pins()["torch"], pins()["triton"]) == ("2.13.0", "3.7.1")
    assert [version for version in pins().values() if "+" in version] == []


def test_a_plain_installation_is_not_asked_for_torch() -> None:
    heavy = re.compile(r"torch|triton|transformers|nvidia")
    assert [line for line in PROJECT["dependencies"] if heavy.match(line)] == []


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_every_configuration_file(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(pip, check=True)
    (wheel,) = tmp_path.glob("pagedsim-*.whl")
    packages = ("pagedsim", "policies", "kernels", "experiments", "conf")
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in packages
        for suffix in ("*.py", "*.yaml", "py.typed")
        for path in (ROOT / package).rglob(suffix)
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    assert expected - held == set()
    beside = {name.partition("/")[0] for name in held} - set(packages)
    assert [name for name in beside if not name.endswith(".dist-info")] == []
