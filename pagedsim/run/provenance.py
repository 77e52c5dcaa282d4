"""Which pagedsim made a result: its version, its commit, and whether it is compiled.

`hatch_build.py` runs this file by its path, so importing it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

ROOT = Path(__file__).parents[2]
RECORDED = "pagedsim/commit.txt"
"""The commit that a wheel was built from; `hatch_build.py` writes it."""
CHANGES = "+changes"
"""What follows the commit where files of the code differ from it."""
_CODE = ("pagedsim", "policies", "kernels", "conf", "experiments", ":!experiments/results")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--", *_CODE)
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables by which git, in a hook for example, means another checkout."""
_PATIENCE = 10.0
"""Seconds after which the commit counts as unknown."""


def asked(root: Path) -> Popen[str] | None:
    """git, asked for the state of the checkout in `root`; None outside a checkout, and without
    git."""
    if not (root / ".git").exists():
        return None
    environment = {key: value for key, value in os.environ.items() if key not in _ELSEWHERE}
    environment |= {"GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_OPTIONAL_LOCKS": "0"}
    try:
        command = ["git", *_STATUS]
        return Popen(
            command, cwd=root, env=environment, stdout=PIPE, stderr=DEVNULL, encoding="utf-8"
        )
    except OSError:
        return None


def answered(git: Popen[str] | None) -> str | None:
    """The commit, with `CHANGES` if there are any; None if git does not know one."""
    if git is None:
        return None
    try:
        lines = git.communicate(timeout=_PATIENCE)[0].splitlines()
    except subprocess.TimeoutExpired:
        git.kill()
        git.wait()
        return None
    oid = "# branch.oid "
    commit = next((line.removeprefix(oid) for line in lines if line.startswith(oid)), "")
    if git.returncode or len(commit) < 40:  # "(initial)": there is none yet
        return None
    changed = any(not line.startswith("#") for line in lines)
    return commit + CHANGES * changed


@cache
def begin() -> Popen[str] | None:
    """Ask for this process's commit without waiting, so that git works beside the imports."""
    return asked(ROOT)


@cache
def commit() -> str | None:
    """The commit of the checkout, or of an installation the one that it was built from; None if
    neither is known. As it was when `begin` was first called."""
    recorded = ROOT / RECORDED
    if not recorded.exists():
        return answered(begin())
    return recorded.read_text(encoding="utf-8").strip()


def made_by() -> dict[str, str]:
    """The version and, where it is known, the commit."""
    from pagedsim import __version__

    known = commit()
    return {"version": __version__, **({"commit": known} if known else {})}


def in_words(made: Mapping[str, str] | None = None) -> str:
    """Version and commit as a line has them; of this pagedsim, if none are given."""
    made = made_by() if made is None else made
    return ", commit ".join(made[name] for name in ("version", "commit") if name in made)


# -- compiled or interpreted -----------------------------------------------------------------------

LISTED = "pagedsim/compiled.txt"
"""A digest and the source of each module that was compiled; `hatch_build.py` writes it."""
TO_COMPILE = "PAGEDSIM_COMPILE=1 pip install . compiles; a clone's folder runs its sources"
"""How to get a compiled installation, and why one may not be what runs."""


def built(root: Path = ROOT) -> str:
    """How the package was built: "compiled"; "interpreted", with the command that compiles; or how
    its files differ from those that were installed."""
    extensions = {
        file.relative_to(root).as_posix().removesuffix(suffix) + ".py"
        for suffix in sorted(EXTENSION_SUFFIXES, key=len)
        for file in (root / "pagedsim").rglob(f"*{suffix}")
    }
    if not (root / LISTED).exists():
        if extensions:
            return _amiss("has extensions that no install made")
        return f"interpreted ({TO_COMPILE})"
    lines = (root / LISTED).read_text().splitlines()
    digests = {source: digest for digest, source in map(str.split, lines)}
    if missing := [source for source in digests if source not in extensions]:
        return _amiss(f"{missing[0]} is compiled no longer")
    for source, digest in digests.items():
        if hashlib.sha256((root / source).read_bytes()).hexdigest() != digest:
            return _amiss(f"{source} has changed since it was compiled")
    return "compiled"


def _amiss(what: str) -> str:
    return f"not what was installed: {what}; install it again"
