"""As if only what a GPU's machine has were installed: put `path` first on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

ABSENT = ("simpy", "hydra", "omegaconf", "wandb", "pandas", "matplotlib", "pyarrow")
SITECUSTOMIZE = f"""
import sys

ABSENT = {ABSENT!r}


class Bare:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.startswith(ABSENT) else self.finder.find_spec(name, path, target)

    def find_distributions(self, *context):
        for found in self.finder.find_distributions(*context):
            if not found.metadata["Name"].lower().replace("_", "-").startswith(ABSENT):
                yield found


sys.meta_path[:] = [
    Bare(finder) if hasattr(finder, "find_distributions") else finder for finder in sys.meta_path
]
"""


def path(place: Path) -> str:
    """A folder whose sitecustomize.py hides the others from every Python that has it."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return str(place)
