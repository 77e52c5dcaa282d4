"""Overrides such as `policy=vtc`, `+workload.extra={a: 1}` and `~slo.ttft`, by Hydra's grammar.

All of the grammar that a single configuration can have: sweeps (`a=1,2`), functions (`range(1, 4)`)
and packages (`group@package=option`) are not among them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagedsim.core import ConfigError

Kind = Literal["change", "add", "force", "delete"]
_KINDS: dict[str, Kind] = {"": "change", "+": "add", "++": "force", "~": "delete"}
_WORD = re.compile(r"(\+\+|\+|~|)([\w/-]+(?:\.[\w/-]+)*)(?:(=)(.*))?", re.DOTALL)
_INT = re.compile(r"[+-]?(0|[1-9]\d*(_\d+)*)")
_FLOAT = re.compile(
    r"[+-]?((\d+(_\d+)*)?\.\d+(_\d+)*([eE][+-]?\d+)?|\d+(_\d+)*\.?([eE][+-]?\d+)|\d+(_\d+)*\.|inf|nan)",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"[\w/\-+.$%*@?|: \t]", re.ASCII)
_SPECIAL = "=;&#<>!^`()"
_ESCAPED = "\\()[]{}:=, \t"


class OverrideError(ConfigError):
    """A word that is no override of a single configuration."""


@dataclass(frozen=True)
class Override:
    """What one word does to a key, or to the choice of a group's option."""

    word: str
    kind: Kind
    key: str
    value: Any = None


def parse(word: str, several: str = "") -> Override:
    """The override of a word; raises OverrideError where it is none.

    `several` says what else several values may be for, such as "-m tries each; ".
    """
    if "@" in word.partition("=")[0]:
        raise OverrideError(f"{word}: an option goes into its own group; @ is not supported")
    found = _WORD.fullmatch(word)
    if found is None or (found[3] is None and found[1] != "~"):
        raise OverrideError(
            f"{word.strip() or repr(word)}: cannot be read as key=value{hint(word)}"
        )
    if found[3] is None:
        return Override(word, "delete", found[2])
    return Override(word, _KINDS[found[1]], found[2], _Reader(word, found[4]).whole(several))


class _Reader:
    """A value, read from left to right."""

    def __init__(self, word: str, text: str) -> None:
        self.word, self.text, self.at = word, text, 0

    def whole(self, several: str) -> Any:
        if not self.text.strip():
            return ""
        value = self._element("")
        if self._next() == ",":
            key = self.word.partition("=")[0]
            raise OverrideError(
                f"{self.word}: several values: {several}a list is written {key}=[{self.text}]"
            )
        if self.at < len(self.text):
            raise self._unreadable()
        return value

    def _unreadable(self) -> OverrideError:
        sign = self.text[self.at : self.at + 1] or "end"
        return OverrideError(
            f"{self.word}: cannot be read as key=value{hint(self.word, sign in _SPECIAL)}"
        )

    def _next(self) -> str:
        """The next sign that is no space, or nothing at the end."""
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _element(self, ends: str) -> Any:
        match self._next():
            case "[":
                return self._items("]", lambda: self._element("]"))
            case "{":
                return dict(self._items("}", self._pair))
            case "'" | '"' as quote:
                return self._quoted(quote)
        return self._bare(f",{ends}")

    def _items(self, end: str, item: Callable[[], Any]) -> list[Any]:
        """What stands between brackets, with commas between."""
        self.at += 1
        found: list[Any] = []
        while self._next() != end or found:
            found.append(item())
            sign = self._next()
            self.at += 1
            if sign == end:
                return found
            if sign != ",":
                raise self._unreadable()
        self.at += 1
        return found

    def _pair(self) -> tuple[Any, Any]:
        key = self._bare(":")
        if self._next() != ":":
            raise self._unreadable()
        self.at += 1
        return key, self._element("}")

    def _quoted(self, quote: str) -> str:
        text = self.text[self.at :]
        found = re.match(rf"{quote}((?:\\.|[^\\{quote}])*){quote}", text, re.DOTALL)
        if found is None:
            raise self._unreadable()
        self.at += found.end()
        # Only before a quote, or the end, does a backslash stand for something else.
        halved = rf"(\\+)({quote}|$)"
        return re.sub(halved, lambda one: "\\" * (len(one[1]) // 2) + one[2], found[1])

    def _bare(self, ends: str) -> Any:
        """A number, a flag, null, or a text without quotes."""
        begin, text, escaped, kept = self.at, "", False, 0
        while self.at < len(self.text) and self.text[self.at] not in ends:
            rest = self.text[self.at :]
            if rest.startswith("${"):
                part = _interpolation(rest)
            elif rest[0] == "\\" and rest[1:2] in _ESCAPED and rest[1:2]:
                text, escaped = (text if kept else text.lstrip()) + rest[1], True
                kept = len(text)
                self.at += 2
                continue
            else:
                part = rest[0] if rest[0] == "\\" or _PLAIN.match(rest) else ""
            if not part:
                raise self._unreadable()
            text += part
            self.at += len(part)
        if begin == self.at:
            raise self._unreadable()
        text = text[:kept] + text[kept:].rstrip()
        return text if escaped else _primitive(text.strip())


def _interpolation(text: str) -> str:
    """`${...}` at the beginning of a text, with what is nested in it; empty if it does not end."""
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if sign == "}" and depth == 0:
            return text[: at + 1]
    return ""


def _primitive(text: str) -> Any:
    lower = text.lower()
    if lower in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[lower]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def hint(word: str, special: bool = False) -> str:
    """What is mostly the reason, where a word was not understood."""
    if not word.strip():
        return ", such as policy=fcfs"
    above, dot, name = word.partition("=")[0].lstrip("+").rpartition(".")
    if dot and " " in name:
        return f"; a name with a space goes into a mapping: '++{above}={{{name}: ...}}'"
    if special and re.search(r"\b[a-z_]+\(", word):
        return "; functions such as float() are not supported: give the value itself"
    if special:
        return "; a text with special signs takes quotes of its own: 'key=\"a=b\"', '[\"a=b\"]'"
    return ""


# -- writing ---------------------------------------------------------------------------------------


def text_of(value: Any) -> str:
    """A plain value as `parse` reads it; keys of mappings are texts and keep their plain signs."""
    if hasattr(value, "item"):  # a number of NumPy's
        value = value.item()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(str(key))}: {text_of(one)}' for key, one in value.items())}}}"
    text = str(value)
    if re.fullmatch(r"[\w./:+-]+", text, re.ASCII) and _primitive(text) == text:
        return text
    escaped = re.sub(r'(\\*)("|$)', lambda one: 2 * one[1] + one[2].replace('"', '\\"'), text)
    return f'"{escaped}"'


def _key(text: str) -> str:
    plain = "".join(sign if _PLAIN.match(sign) else "_" for sign in text)
    return f"_{plain}" if _primitive(plain) != plain or not plain.strip() else plain
