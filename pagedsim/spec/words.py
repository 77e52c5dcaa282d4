"""What one word of a command line, or one keyword argument of Python, changes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pagedsim.core import ConfigError

Kind = Literal["change", "add", "force", "replace", "delete"]
"""`replace` is what no word can: a mapping in the place of another; typed again, it is merged."""
_SIGNS: dict[Kind, str] = {"change": "", "add": "+", "force": "++", "replace": "++", "delete": "~"}
_KINDS: dict[str, Kind] = {"CHANGE": "change", "ADD": "add", "FORCE_ADD": "force", "DEL": "delete"}
_SPECIAL = re.compile(r"[=;&#<>!^`()]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_PLAIN_TEXT = re.compile(r"[\w./:+-]+", re.ASCII)
_PLAIN_KEY = re.compile(r"[\w/\-+.$%*@?|: \t]+", re.ASCII)
_NO_TEXT = re.compile(
    r"null|true|false|[+-]?([\d_]+(\.[\d_]*)?|\.[\d_]+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE
)
"""What would be read as another value than a text."""


@dataclass(frozen=True)
class Change:
    """A change of one key, or the choice of a group's option."""

    key: str
    value: Any = None
    """From Python it may be an object."""
    kind: Kind = "change"
    typed: str = ""
    """The word, where it was one."""

    def __hash__(self) -> int:
        return hash((self.key, self.kind))

    def __str__(self) -> str:
        if self.typed:
            return self.typed
        value = "" if self.kind == "delete" else f"={text_of(self.value)}"
        return f"{_SIGNS[self.kind]}{self.key}{value}"


Words = Iterable["str | Change"]


def changes_of(words: Words, sweeps: bool = True) -> list[Change]:
    """The changes of words; those that are changes already stay as they are.

    `sweeps`: whether an error may offer to try several values.
    """
    return [word if isinstance(word, Change) else parse(word, sweeps) for word in words]


@cache
def parse(word: str, sweeps: bool = True) -> Change:
    """The change of a word; ConfigError where Hydra's parser reads none, or several."""
    override = _override(word)
    if override.is_sweep_override():
        key, _, values = word.partition("=")
        offer = "-m tries each; " if sweeps else ""
        raise ConfigError(f"{word}: several values: {offer}a list is written {key}=[{values}]")
    return Change(override.key_or_group, override.value(), _KINDS[override.type.name], word)


def swept(word: str) -> Iterator[Change]:
    """The changes of a word of a sweep, one for each of its values as far as they are known."""
    override = _override(word)
    if not override.is_sweep_override():
        yield parse(word)
        return
    if override.value_type.name == "GLOB_CHOICE_SWEEP":
        return  # names only options that there are
    try:
        values = list(override.sweep_string_iterator())
    except Exception as error:  # such as of range(1, 2, 0)
        raise ConfigError(f"{word}: {' '.join(str(error).split())}") from error
    for value in values:
        yield parse(f"{word.partition('=')[0]}={value}")


def refuse_unreadable(word: str) -> None:
    """Raise ConfigError for a word that Hydra's parser cannot read."""
    _override(word)


def _override(word: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(
            f"{word.strip() or repr(word)}: cannot be read as key=value{_hint(word)}"
        ) from error
    if override.package is not None or "@" in word.partition("=")[0]:
        raise ConfigError(f"{word}: an option goes into its own group; @ is not supported")
    return override


def _hint(word: str) -> str:
    """What is mostly the reason, where a word was not understood."""
    if not word.strip():
        return ", such as policy=fcfs"
    name, _, value = word.partition("=")
    if value.count("{") != value.count("}") or value.count("[") != value.count("]"):
        return "; a word with spaces takes quotes around it: 'key={a: [b, c]}'"
    above, dot, last = name.lstrip("+").rpartition(".")
    if dot and " " in last:
        return f"; a name with a space goes into a mapping: '++{above}={{{last}: ...}}'"
    if _SPECIAL.search(_QUOTED.sub("", value)):
        return "; a text with special signs takes quotes of its own: 'key=\"a=b\"', '[\"a=b\"]'"
    return ""


def key_of(word: str | Change) -> str:
    """What a word sets."""
    return word.key if isinstance(word, Change) else word.partition("=")[0].lstrip("+~")


def group_of(word: str | Change) -> str:
    """The first part of the key that a word sets."""
    return re.split(r"[.=@]", key_of(word))[0]


# -- writing ---------------------------------------------------------------------------------------


def command_line(words: Words, options: Sequence[str] = ()) -> str:
    """The command of these words, with options of Hydra's before them."""
    return shlex.join(["python", "-m", "pagedsim", *options, *map(str, words)])


def text_of(value: Any) -> str:
    """A value as it is typed; a key with signs that no word can have is quoted."""
    if hasattr(value, "item"):  # a number of NumPy's
        value = value.item()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(str(key))}: {text_of(inner)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    text = str(value)
    if _PLAIN_TEXT.fullmatch(text) and not _NO_TEXT.fullmatch(text):
        return text
    escaped = re.sub(r'(\\*)("|$)', lambda end: 2 * end[1] + end[2].replace('"', '\\"'), text)
    return f'"{escaped}"'


def _key(text: str) -> str:
    plain = _PLAIN_KEY.fullmatch(text) and not _NO_TEXT.fullmatch(text) and text.strip()
    return text if plain else json.dumps(text, ensure_ascii=False)
