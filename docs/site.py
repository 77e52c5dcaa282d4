"""Hooks of the documentation site: generated reference pages, and links that leave docs/.

`mkdocs.yml` names this file. The configuration reference comes from the comments in conf/ and the
docstrings of `pagedsim.spec.roots`.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pagedsim.run.help import GROUPS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "experiments/results/"
MOVED = {
    "README.md": "index.md",
    **{name: name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")},
    f"{RESULTS}README.md": "results/index.md",
    **{
        f"{RESULTS}{name}.md": f"results/{name}.md"
        for name in ("performance", "fidelity", "published")
    },
}
"""Pages of the repository outside docs/, and their places in the site."""
EXAMPLE_GROUPS = ("model", "hardware", "stack")
"""Groups whose options nearly all have the same keys; those of `EXAMPLES` are shown."""
EXAMPLES = ("llama-3.1-8b", "hf", "h100", "vllm-0.33")
MODULES = {
    "scheduler": ("pagedsim.core.scheduler", "pagedsim.core.plan", "pagedsim.core.request"),
    "policy": ("pagedsim.core.policy", "pagedsim.core.batch_state"),
    "router": ("pagedsim.policies.routing.router",),
    "batching": ("pagedsim.core.batching.base", "pagedsim.core.queues"),
    "memory": ("pagedsim.core.memory.base",),
    "study": ("pagedsim.run.study", "pagedsim.run.runs", "pagedsim.run.job"),
    "engine": ("pagedsim.engine.llm", "pagedsim.core.sampling"),
    "build": ("pagedsim.build",),
}
"""Modules of the API reference, by page."""
LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> None:
    """Add the generated pages to the navigation."""
    reference = ["settings", *GROUPS]
    nav = config.nav or []
    nav.insert(-1, {"Reference": [f"reference/{name}.md" for name in reference]})
    nav.insert(-1, {"API": [f"api/{name}.md" for name in MODULES]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and those outside docs/, with their pictures."""
    for place, text in pages():
        files.append(File.generated(config, place, content=text))
    for source, place in MOVED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
        for _, _, target in LINK.findall(text):
            path = _resolved(source, target)
            if path.endswith((".png", ".svg")):
                shown = File.generated(config, _place(path), abs_src_path=str(ROOT / path))
                files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links of the site.

    What the site does not have, such as a source file, keeps its words and loses the link.
    """
    uri = page.file.src_uri
    source = {place: path for path, place in MOVED.items()}.get(uri, f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path:
            return match[0]
        place = _place(_resolved(source, path))
        if files.get_file_from_path(place) is None:
            return words
        link = posixpath.relpath(place, posixpath.dirname(uri))
        return f"{image}[{words}]({link}{hash_}{anchor})"

    return LINK.sub(moved, markdown)


def _resolved(source: str, target: str) -> str:
    """The path in the repository that a link in `source` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _place(path: str) -> str:
    """The place in the site of a file of the repository."""
    return MOVED.get(path) or path.removeprefix("docs/").removeprefix("experiments/")


def pages() -> Iterator[tuple[str, str]]:
    """The generated pages, each with its place in the site."""
    yield "reference/settings.md", "\n".join(_settings())
    for group, meaning in GROUPS.items():
        yield f"reference/{group}.md", "\n".join(_group(group, meaning))
    for name, modules in MODULES.items():
        text = "".join(f"\n::: {module}\n" for module in modules)
        yield f"api/{name}.md", f"# {name.capitalize()}\n{text}"


class Doctests(Extension):
    """Show the examples of docstrings as code."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"(?ms)^>>>.*?(?=\n\n|\Z)", r"```pycon\n\g<0>\n```", text)


# -- settings of a run, from the schema ------------------------------------------------------------


def _settings() -> Iterator[str]:
    """The fields of `Config`, and those of `Serve` that it lacks."""
    tree = ast.parse((ROOT / "pagedsim/spec/roots.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    yield from (
        "# Settings",
        "",
        "`python -m pagedsim key=value`. Each group has a page of its own.",
    )
    ours = list(_fields(classes, "Config"))
    yield from _table(ours)
    yield from ("", "## `python -m pagedsim serve`")
    known = {key for key, _, _ in ours}
    yield from _table(row for row in _fields(classes, "Serve") if row[0] not in known)


def _fields(
    classes: dict[str, ast.ClassDef], name: str, under: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of each field of a dataclass, nested ones included."""
    body = classes[name].body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key, kind = under + node.target.id, ast.unparse(node.annotation)
        if kind in classes:
            yield from _fields(classes, kind, f"{key}.")
            continue
        if key in GROUPS or key == "study":
            continue
        default = ast.unparse(node.value) if node.value else ""
        default = "{}" if "factory=dict" in default else default
        text = after.value.value if _is_text(after) else ""
        yield key, {"None": "null"}.get(default, default.strip("'").lower()), " ".join(text.split())


# -- groups, from the comments in conf/ ------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A file of a group: what its first comment says, and its keys."""

    name: str
    summary: str
    keys: list[tuple[str, str, str]]
    """Key, value and comment."""


def read_option(path: Path) -> Option:
    """Read a file of conf/."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[0].startswith("# @package"):
        lines = lines[1:]
    first = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    summary = " ".join(line.lstrip("# ") for line in lines[:first])
    return Option(path.stem, summary, list(_keys(lines[first:])))


def _keys(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """The keys of a YAML file, each with its value, and the comment above or behind it."""
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in lines:
        if not line.strip():
            above = []
        elif line.lstrip().startswith("#"):
            above.append(line.strip().lstrip("# "))
        elif match := re.match(r"( *)([\w.~/@]+):(?: +(.*))?$", line):
            indent, (value, behind) = len(match[1]), _split(match[3] or "")
            path = [parent for parent in path if parent[0] < indent] + [(indent, match[2])]
            key = ".".join(name for _, name in path)
            if key.startswith("defaults") or key.rpartition(".")[2] in ("_target_", "_convert_"):
                continue
            yield key, value, " ".join([*above, *([behind] if behind else [])])
            above = []


def _split(text: str) -> tuple[str, str]:
    """A value and the comment behind it."""
    value, _, comment = text.partition(" #") if not text.startswith("#") else ("", "", text[1:])
    return value.strip(), comment.strip()


def _group(group: str, meaning: str) -> Iterator[str]:
    """A page for a group: its options in a table, then the keys of each."""
    options = [read_option(path) for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]
    yield from (f"# {group}", "", f"`{group}=`: {meaning}.", "")
    yield from ("| option | what it is |", "|---|---|")
    yield from (_row(f"`{option.name}`", option.summary) for option in options)
    shown = [option for option in options if option.name in EXAMPLES]
    for option in shown if group in EXAMPLE_GROUPS else options:
        if option.keys:
            yield from ("", f"## {group}={option.name}")
            yield from _table(option.keys)


def _table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    yield from ("", "| key | value | meaning |", "|---|---|---|")
    for key, value, meaning in rows:
        yield _row(f"`{key}`", f"`{value}`" if value else "", meaning)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
