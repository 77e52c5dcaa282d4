"""Whether the package is compiled, and from the sources that lie here."""

from __future__ import annotations

import hashlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = "pagedsim/compiled.txt"
"""A digest and the source of each module that was compiled; `hatch_build.py` writes it."""
NOTICE = "pagedsim/interpreted.txt"
"""Why nothing was compiled where a compiler was looked for; `hatch_build.py` writes it."""
COMPILING = "'pip install .' compiles; run it from another folder"
"""What helps where the sources of a clone run, or where compiling was turned off."""


def built(root: Path = ROOT) -> str:
    """How the package was built, in a few words: compiled; interpreted, with the reason or the
    command that compiles; or what is amiss."""
    extensions = {
        file.relative_to(root).as_posix().removesuffix(suffix) + ".py"
        for suffix in sorted(EXTENSION_SUFFIXES, key=len)
        for file in (root / "pagedsim").rglob(f"*{suffix}")
    }
    if not (root / LISTED).exists():
        if extensions:
            return _amiss("has extensions that no install made")
        notice = root / NOTICE
        why = notice.read_text().strip() if notice.exists() else COMPILING
        return f"interpreted ({why})"
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
