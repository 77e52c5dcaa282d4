"""How a wheel is built: of plain Python, or with `PAGEDSIM_COMPILE=1` its hot part compiled.

Editable installations are never compiled: extensions would hide changes of the sources. A wheel or
an sdist of a checkout records its commit; a wheel of an sdist takes over that one.

hatchling calls `BuildHook`, in an environment of its own; that runs this file as a script, so that
compiler output can be held back unless compiling fails.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "PAGEDSIM_COMPILE"
NEEDS = ("mypy==2.4.1", "setuptools>=77", "simpy>=4.1")
"""Build requirements beside a C compiler; SimPy for its types. The version of mypy is that of
constraints.txt, with which this code is tested."""
COMPILED = (
    *("pagedsim/core/**/*.py", "pagedsim/sglang/*.py"),
    *(f"pagedsim/sim/{name}.py" for name in ("beams", "environment", "feed", "server")),
    *(f"pagedsim/sim/cost/{name}.py" for name in ("base", "terms")),
    "pagedsim/metrics/recorder.py",
)
"""What a simulation spends its time in."""
INTERPRETED = {
    "pagedsim/core/compiled.py",  # what it defines is not there for a compiler
    "pagedsim/core/errors.py",  # mypyc derives no class from ValueError
    "pagedsim/core/symbolic_prompt.py",  # mypyc derives no class from Sequence
    "pagedsim/core/policy_validation.py",  # as sampling.py: it validates
    "pagedsim/core/contracts.py",  # as policy_validation.py; and it makes classes
    "pagedsim/core/sampling.py",  # it validates its own arguments
    "pagedsim/core/policy.py",  # whatever a user's class may do with it is to work
    "pagedsim/core/memory/eviction_policy.py",  # as policy.py
}
LISTED = "pagedsim/compiled.txt"
"""The compiled sources, each with a digest; `pagedsim/run/provenance.py` reads it."""


class BuildHook(BuildHookInterface[Any]):
    """Adds the commit to an sdist; to a wheel the commit and, if requested, extensions."""

    def dependencies(self) -> list[str]:
        return list(NEEDS) if self.target_name == "wheel" and _compile_requested() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.scratch = tempfile.TemporaryDirectory()
        folder = Path(self.scratch.name)
        compiles = self.target_name == "wheel" and _compile_requested()
        if version == "editable":  # which asks git for its commit when it runs
            if compiles:
                _refuse("extensions would hide changes of the sources: install without -e")
            return
        _record_commit(Path(self.root), folder / "wheel")
        if compiles:
            if error := _missing_compiler() or _compile_error(Path(self.root), folder):
                _refuse(error)
            build_data["pure_python"], build_data["infer_tag"] = False, True
            shutil.copytree(folder / "compiled", folder / "wheel", dirs_exist_ok=True)
        for file in (folder / "wheel").rglob("*.*"):
            build_data["force_include"][str(file)] = str(file.relative_to(folder / "wheel"))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.scratch.cleanup()


def _compile_requested() -> bool:
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{SWITCH}={value}: must be 1, to compile, or 0")
    return value == "1"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def _record_commit(root: Path, folder: Path) -> None:
    """Put the commit of the checkout into `folder`; nothing where there is none."""
    ours = runpy.run_path(str(root / "pagedsim/run/provenance.py"))
    if commit := ours["answered"](ours["asked"](root)):
        _write(folder / ours["RECORDED"], commit)


def _refuse(error: str) -> None:
    raise SystemExit(f"{SWITCH}=1: {error}; or unset it, and nothing has to be compiled")


def _missing_compiler() -> str:
    """The error if the C compiler is known to be missing; empty otherwise."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "")
    if compiler and shutil.which(compiler[0]) is None:
        return f"no C compiler: there is no {compiler[0]!r} here; install one, or set CC"
    return ""


def _compile_error(root: Path, folder: Path) -> str:
    """Compile into `folder`/compiled, with the list of sources; returns the error, if any."""
    child = subprocess.run(
        [sys.executable, __file__, str(folder)], cwd=root, capture_output=True, text=True
    )
    if not child.returncode:
        return ""
    output = f"{child.stdout}\n{child.stderr}".splitlines()
    errors = [line.strip() for line in output if "error:" in line][:3]
    last = [line for line in output if line.strip() and "warning:" not in line][-1:]
    return f"compiling failed: {' | '.join(errors or last)}"


def _sources() -> list[str]:
    matches = {path.as_posix() for pattern in COMPILED for path in Path().glob(pattern)}
    return sorted(path for path in matches - INTERPRETED if not path.endswith("__init__.py"))


def _build(folder: Path) -> None:
    import simpy
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class Parallel(build_ext):
        """Compiles the files of an extension on all cores; setuptools takes one after another."""

        def build_extensions(self) -> None:
            compile_serially = self.compiler.compile

            def compile_all(sources: list[str], *args: Any, **options: Any) -> list[str]:
                def compile_file(source: str) -> list[str]:
                    return compile_serially([source], *args, **options)

                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    return list(chain.from_iterable(pool.map(compile_file, sources)))

            self.compiler.compile = compile_all
            super().build_extensions()

    sources = _sources()
    # Of what is installed SimPy alone: to read the types of NumPy and others would take minutes.
    shutil.copytree(Path(simpy.__file__).parent, folder / "types" / "simpy")
    os.environ["MYPYPATH"] = str(folder / "types")
    options = [
        "--no-site-packages",
        "--config-file=",
        "--explicit-package-bases",
        "--ignore-missing-imports",
    ]
    options += ["--follow-imports=silent", f"--cache-dir={folder / 'cache'}"]
    extensions = mypycify(
        [*options, *sources],
        opt_level="2",  # as fast as 3, in two thirds of the time
        debug_level="0",
        multi_file=True,
        target_dir=str(folder / "c"),
        group_name="pagedsim",
    )
    settings = {"name": "pagedsim", "ext_modules": extensions, "cmdclass": {"build_ext": Parallel}}
    command = Distribution(settings).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "compiled"), str(folder / "objects")
    command.ensure_finalized()
    command.run()
    lines = [f"{hashlib.sha256(Path(path).read_bytes()).hexdigest()} {path}" for path in sources]
    _write(folder / "compiled" / LISTED, "\n".join(lines))


if __name__ == "__main__":
    _build(Path(sys.argv[1]))
