"""The repository's sentences are about components, requests and settings, not about people."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEOPLE = [f"{word}body" for word in ("no", "some", "any", "every")] + [f"who{'ever'}"]
IDIOM = re.compile(rf"(?<![a-z])({'|'.join(PEOPLE)}|(is|are) t[o]ld)(?![a-z])", re.IGNORECASE)
FOLDERS = ("pagedsim", "policies", "kernels", "experiments", "conf", "docs", "tests")
FILES = [
    path
    for pattern in ("*.md", "*.py", *(f"{folder}/**/*" for folder in FOLDERS))
    for path in sorted(ROOT.glob(pattern))
    if path.suffix in (".py", ".md", ".yaml", ".yml") and path.name != "CHANGELOG.md"
]


def idioms(text: str) -> list[str]:
    """Lines with words for people, each with its number."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"{number}: {line.strip()}" for number, line in lines if IDIOM.search(line)]


def test_no_file_speaks_of_people() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in FILES
        if (lines := idioms(path.read_text(encoding="utf-8")))
    }
    assert found == {}
