"""What a client has of a streamed answer, so that another server can go on with it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pydantic_core import from_json, to_json


class Differs(Exception):
    """A second answer does not begin with what the client has of the first."""


class Passed:
    """The events of an answer as they are passed on: whole ones, and none twice.

    >>> passed = Passed()
    >>> passed.feed(b'data: {"id":"a","choices":[{"index":0,"text":" 1"}]}' + b"\\n\\ndata: {")
    b'data: {"id":"a","choices":[{"index":0,"text":" 1"}]}\\n\\n'
    >>> passed.restart()
    >>> passed.feed(b'data: {"id":"b","choices":[{"index":0,"text":" 1 2"}]}' + b"\\n\\n")
    b'data: {"id":"a","choices":[{"index":0,"text":" 2"}]}\\n\\n'
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Parts of texts so far."""
        self._rest = b""
        self._id: str | None = None
        self._texts = defaultdict[int, list[str]](list)  # by choice
        self._had: dict[int, str] | None = None  # of these, what is to come again

    def restart(self) -> None:
        """The answer begins anew; raises Differs later, where it is another one."""
        self._rest, self.tokens = b"", 0
        self._had = {index: "".join(texts) for index, texts in self._texts.items()}

    def feed(self, part: bytes) -> bytes:
        """The events to pass on, of bytes as they come."""
        *events, self._rest = (self._rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        return b"".join(map(self._kept, events))

    def end(self) -> bytes:
        """What is left when no more comes."""
        return self.feed(b"\n\n") if self._rest else b""

    def _kept(self, event: bytes) -> bytes:
        """An event, without what the client has of it; nothing if that is all."""
        whole = event + b"\n\n"
        if not event.startswith(b"data: {"):  # such as [DONE]
            return whole
        try:
            plain: dict[str, Any] = from_json(event.removeprefix(b"data: "))
        except ValueError:  # no event of OpenAI's
            return whole
        self._id = self._id or plain.get("id")
        choices, new = plain.get("choices") or (), False
        for choice in choices:
            new |= self._noted(choice)
        if self._had is None:
            return whole
        if choices and not new:
            return b""
        return b"data: " + to_json({**plain, "id": self._id}) + b"\n\n"

    def _noted(self, choice: dict[str, Any]) -> bool:
        """Note a part of a choice, and take from it what the client has; whether that was all."""
        index, said = choice.get("index") or 0, choice.get("delta", choice)
        key = "text" if said is choice else "content"
        text = said.get(key) or ""
        self.tokens += bool(text)
        if self._had is not None:
            had = self._had.get(index, "")
            if not (had.startswith(text) or text.startswith(had)) or said.get("tool_calls"):
                raise Differs
            self._had[index] = had[len(text) :]
            said[key] = text = text[len(had) :]
        self._texts[index].append(text)
        return bool(text or choice.get("finish_reason"))
