"""A request as the JSON that is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedsim.core import Request
from pagedsim.run.http.prompts import Contents

PATHS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""The endpoints, by what they are called here."""


@dataclass(frozen=True)
class Bodies:
    """How requests are written for one server."""

    model: str
    contents: Contents
    endpoint: str = "completions"
    as_ids: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields; None takes one away."""

    def of(self, request: Request, output_len: int) -> bytes:
        """What asks for an answer of `output_len` tokens, whatever the text would end with."""
        body: dict[str, Any] = {
            "model": self.model,
            **self._prompt(request),
            "max_tokens": output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_labels(request),
        }
        body |= self.extra
        kept = {name: value for name, value in body.items() if value is not None}
        return json.dumps(kept, separators=(",", ":")).encode()

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self.as_ids:
            return {"prompt": self.contents.ids(request)}
        text = self.contents.text(request)
        if self.endpoint == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}


def _labels(request: Request) -> dict[str, Any]:
    """What the workload says of a request, where it says anything."""
    labels: dict[str, Any] = {"temperature": 0.0}
    if request.width > 1:  # as greedy ones they would be the same, and some servers refuse that
        labels = {"temperature": 1.0, "n": request.width}
    if request.priority:
        whole = float(request.priority).is_integer()
        labels["priority"] = int(request.priority) if whole else request.priority
    if request.client:
        labels["user"] = request.client
    if request.deadline is not None:
        labels["deadline"] = round(request.deadline - (request.arrival or 0.0), 6)
    return labels
