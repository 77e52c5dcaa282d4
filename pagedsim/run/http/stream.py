"""An answer that comes in parts, as Server-Sent Events."""

from __future__ import annotations

import json
from array import array
from typing import Any

END = b"[DONE]"
FAILED = ("abort", "error", "timeout")
"""Reasons to finish that are none: the server gave the request up."""


class Answer:
    """What came of one request, and when; times are in seconds of the run.

    Fed with bytes as they come. A part is a token, or some where a server tells several at once.
    """

    def __init__(self) -> None:
        self.times = array("d")
        """When each part of the first sequence came."""
        self.first: float | None = None
        self.last: float | None = None
        self.parts = 0
        """Of all sequences."""
        self.texts: list[str] = []
        """Of the first sequence."""
        self.usage: dict[str, Any] = {}
        self.reason = ""
        """Why it ended, as the server says."""
        self.error = ""
        """What went wrong, in words that are the same for all that went wrong so."""
        self.detail = ""
        """What the server says of that."""
        self.done = False
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """More of it has come."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # an empty line, a comment, or a name of the event
            said = line[5:].strip()
            if said == END:
                self.done = True
            else:
                self._event(said, now)

    def close(self) -> None:
        """No more comes; notes what is missing."""
        if self.error:
            return
        if self.reason in FAILED:
            self.error = f"finish_reason {self.reason}"
        elif not (self.done or self.reason):
            self.error = "the answer broke off"
        elif self.first is None:
            self.error = "the answer was empty"

    def _event(self, said: bytes, now: float) -> None:
        try:
            event = json.loads(said)
            if event.get("error"):
                self.error, self.detail = "an error within the answer", words_of(event)
            for choice in event.get("choices") or ():
                self._choice(choice, now)
            if event.get("usage"):
                self.usage = dict(event["usage"])
        except (ValueError, TypeError, AttributeError):
            self.error = self.error or "an event that is not OpenAI's"
            self.detail = said[:80].decode(errors="replace")

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else _said(delta)
        if reason := choice.get("finish_reason"):
            self.reason = str(reason)
        # Who speaks, and why it ends, are told in events of their own by some servers: no tokens.
        # Else a token may have no text yet, such as half of a letter.
        if not text and (reason or (delta is not None and "role" in delta)):
            return
        self.parts += 1
        if self.first is None:
            self.first = now
        self.last = now
        if not choice.get("index"):
            self.times.append(now)
            if text:
                self.texts.append(str(text))


def _said(delta: dict[str, Any]) -> str:
    """The text of a part of a chat, thoughts included."""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def words_of(said: Any) -> str:
    """What an error in OpenAI's shape, or another, says, in a line."""
    inner = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return " ".join(str(inner).split())[:200]
