"""How a wheel is built: its hot part compiled, if there is a C compiler, or of plain Python.

`PAGEDSIM_COMPILE=0` compiles nothing, `=1` fails where nothing can be compiled. Editable
installations are never compiled: extensions would hide changes of the sources. A wheel or an sdist
of a checkout records its commit; a wheel of an sdist takes over that one.

hatchling calls `Building`, in an environment of its own; that runs this file as a script, so that
what compilers print can be kept back unless they fail.
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
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "PAGEDSIM_COMPILE"
NEEDS = ("mypy==2.4.1", "setuptools>=77", "simpy>=4.1")
"""What compiling takes beside a C compiler; SimPy for its types. The version of mypy is that of
constraints.txt, with which this code is tested."""
COMPILED = (
    *("pagedsim/core/**/*.py", "pagedsim/sglang/*.py"),
    *(f"pagedsim/sim/{name}.py" for name in ("beams", "environment", "feed", "server", "tiers")),
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
}
LISTED = "pagedsim/compiled.txt"
"""What was compiled, and a digest of each source; `pagedsim/run/provenance.py` reads it."""
NOTICE = "pagedsim/interpreted.txt"
"""Why nothing was compiled although nothing forbade it; the same module reads it."""


class Building(BuildHookInterface[Any]):
    """Adds the commit and, where they can be had, extensions to a wheel that has the sources; to
    an sdist the commit alone."""

    def dependencies(self) -> list[str]:
        if self.target_name != "wheel" or _asked() == "0" or _is_for_editable():
            return []
        return list(NEEDS) if _asked() == "1" or not _no_compiler() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.made = tempfile.TemporaryDirectory()
        folder = Path(self.made.name)
        if version == "editable":  # which asks git for its commit when it runs
            if _asked() == "1":
                _refuse("extensions would hide changes of the sources: install without -e")
            return
        _record_commit(Path(self.root), folder / "wheel")
        if self.target_name == "wheel" and _asked() != "0":
            if why := _no_compiler() or _failure(Path(self.root), folder):
                if _asked() == "1":
                    _refuse(why)
                self.app.display_warning(f"pagedsim is not compiled, and slower: {why}")
                _write(folder / "wheel" / NOTICE, why)
            else:
                build_data["pure_python"], build_data["infer_tag"] = False, True
                shutil.copytree(folder / "compiled", folder / "wheel", dirs_exist_ok=True)
        for file in (folder / "wheel").rglob("*.*"):
            build_data["force_include"][str(file)] = str(file.relative_to(folder / "wheel"))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.made.cleanup()


def _asked() -> str:
    """What PAGEDSIM_COMPILE says: 0, 1, or nothing."""
    said = os.environ.get(SWITCH, "")
    if said not in ("", "0", "1"):
        raise SystemExit(f"{SWITCH}={said}: must be 1, to compile, or 0")
    return said


def _is_for_editable() -> bool:
    """Whether this process is asked what an editable installation takes; hatchling does not say."""
    return any("editable" in word for word in sys.argv)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def _record_commit(root: Path, folder: Path) -> None:
    """Put the commit of the checkout into `folder`; nothing where there is none."""
    ours = runpy.run_path(str(root / "pagedsim/run/provenance.py"))
    if commit := ours["answered"](ours["asked"](root)):
        _write(folder / ours["RECORDED"], commit)


def _refuse(why: str) -> None:
    raise SystemExit(f"{SWITCH}=1: {why}; or unset it, and nothing has to be compiled")


def _no_compiler() -> str:
    """Why nothing can be compiled, as far as that is known before; empty: it can."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "")
    if compiler and shutil.which(compiler[0]) is None:
        return f"no C compiler: there is no {compiler[0]!r} here; install one, or set CC"
    return ""


def _failure(root: Path, folder: Path) -> str:
    """Put the extensions, and a list of them, into `folder`/compiled; returns why that failed."""
    child = subprocess.run(
        [sys.executable, __file__, str(folder)], cwd=root, capture_output=True, text=True
    )
    if not child.returncode:
        return ""
    said = f"{child.stdout}\n{child.stderr}".splitlines()
    errors = [line.strip() for line in said if "error:" in line][:3]
    last = [line for line in said if line.strip() and "warning:" not in line][-1:]
    return f"compiling failed: {' | '.join(errors or last)}"


def _sources() -> list[str]:
    found = {str(path) for pattern in COMPILED for path in Path().glob(pattern)}
    return sorted(one for one in found - INTERPRETED if not one.endswith("__init__.py"))


def _build(folder: Path) -> None:
    import simpy
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class Parallel(build_ext):
        """Compiles the files of an extension on all cores; setuptools takes one after another."""

        def build_extensions(self) -> None:
            one_by_one = self.compiler.compile

            def compile_all(sources: list[str], *rest: Any, **more: Any) -> list[str]:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    made = pool.map(lambda source: one_by_one([source], *rest, **more), sources)
                    return [file for files in made for file in files]

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
    lines = [f"{hashlib.sha256(Path(one).read_bytes()).hexdigest()} {one}" for one in sources]
    _write(folder / "compiled" / LISTED, "\n".join(lines))


if __name__ == "__main__":
    _build(Path(sys.argv[1]))
