"""The tests of the light package under every supported version of Python that is here: `nox`.

`nox -s light-3.13 -- tests/core` passes words on to pytest. Versions that pyenv has installed are
found, others are skipped. The engine's tests need torch, whose wheels are large: the README's
command runs them under one version.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

SUPPORTED = ("3.11", "3.12", "3.13")

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = False
pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
installed = map(str, sorted(pyenv.glob("versions/3.*/bin")))
os.environ["PATH"] = os.pathsep.join((*installed, os.environ["PATH"]))


@nox.session(python=SUPPORTED)
def light(session: nox.Session) -> None:
    """Everything that needs no torch."""
    session.install("-c", "constraints.txt", "-e", ".[serve,tune,cluster,dev]")
    session.run("pytest", "-n", "auto", *session.posargs)
