"""The protocol of a benchmark in a closed loop: what it asked, and how its server was started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pagedsim.fidelity.rows import Row
from pagedsim.server import CACHE_DTYPES, ServerSpec
from pagedsim.spec.composed import Composed
from pagedsim.spec.run import RunSpec, Settings

COLUMNS = {
    "server": "an option of conf/server, and settings besides: vllm-0.33 memory=paged",
    "shortest": "lengths are drawn from this share of the row's up to all of it; 1: they are fixed",
    "rounds": "requests that were measured, for each concurrent one",
}
"""The columns that a row of a closed loop must have, and what they say."""
OPTIONAL = ("warmup", "unique_prompts", "max_seqs", "max_batched_tokens", "kv_cache_dtype")


@dataclass(frozen=True)
class Protocol:
    """How a benchmark drove a server, which kept a number of requests in flight."""

    server: tuple[str, ...]
    """Words that compose it: `server=...` and further settings."""
    shortest: float
    """Lengths are drawn from this share of the row's up to all of it; 1: they are fixed."""
    rounds: int
    """Measured requests, for each concurrent one."""
    warmup: int = 0
    """Requests before these, likewise, which do not count."""
    unique_prompts: int | None = None
    """Prompts that are used in turn; None: all differ."""
    max_seqs: int | None = None
    """None: as the server starts, as are the tokens of a step."""
    max_batched_tokens: int | None = None
    kv_cache_dtype: str = "auto"

    @classmethod
    def of(cls, row: Row, server: Sequence[str] = ()) -> Protocol:
        """That of a row; `server` are the words of one that does not say its own."""

        def whole(column: str, low: int) -> int | None:
            if not row.text(column):
                return None
            must = f"empty, or a whole number from {low}"
            return int(row.number(column, must, low=low, whole=True))

        words = _words(row.text("server")) or tuple(server)
        if not words:
            raise row.wrong("server", f"{COLUMNS['server']}; or the command has server=")
        cache = row.text("kv_cache_dtype") or "auto"
        if cache not in CACHE_DTYPES:
            raise row.wrong("kv_cache_dtype", f"empty, or one of {', '.join(CACHE_DTYPES)}")
        return cls(
            words,
            row.number("shortest", "a share above 0, 1 at most", above=0, high=1),
            int(row.number("rounds", "a whole number from 1", low=1, whole=True)),
            whole("warmup", 0) or 0,
            whole("unique_prompts", 1),
            whole("max_seqs", 1),
            whole("max_batched_tokens", 1),
            cache,
        )

    def limited(self, server: ServerSpec, longest: int) -> ServerSpec:
        """The server with the limits of this protocol, for requests of up to `longest` tokens."""
        seqs = self.max_seqs or server.max_seqs
        tokens = self.max_batched_tokens or server.max_batched_tokens
        if tokens is not None:  # as servers start that are asked for more sequences than tokens
            tokens = max(tokens, seqs)
        return replace(server, max_seqs=seqs, max_batched_tokens=tokens, max_model_len=longest)


def _words(text: str) -> tuple[str, ...]:
    first, *rest = text.split() or [""]
    return (first if "=" in first else f"server={first}", *rest) if first else ()


def server_of(words: Sequence[str], hardware: str) -> ServerSpec:
    """The server that words compose on a GPU, with policies of its own."""
    return RunSpec(_composed(tuple(words), hardware)).server


def pool_of(words: Sequence[str], hardware: str) -> Mapping[str, Any]:
    """How it sizes its pool: the rule of `sized`."""
    memory = _composed(tuple(words), hardware)["memory"]
    return {key: memory[key] for key in ("pool", "reserved_gib")}


def stack_of(words: Sequence[str], hardware: str) -> str:
    """The name of its stack."""
    return str(_composed(tuple(words), hardware)["stack"]["name"])


@lru_cache(maxsize=256)
def _composed(words: tuple[str, ...], hardware: str) -> Settings:
    return Composed.of([*words, f"hardware={hardware}"]).resolved(missing=True)
