"""Results that do not depend on who else is in the batch, in Triton's interpreter.

See `interpreted.py` for how this file is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedsim.kernels import attention, decode, tuning
from pagedsim.kernels import ops as kernels
from pagedsim.kernels.tiles import Split, Tiles
from pagedsim.kernels.tuning import Entry, Heads
from tests.kernels.cases import Case, check

SMALL = Tiles(rows=16, keys=16, warps=4, stages=2)
BATCH = Case(((1, 150), (1, 0), (1, 1), (1, 33), (1, 16)), kv_heads=1, head_dim=32)
SPLITS = [Split(16), Split(4), Split(1), Split(8, 3), Split(2, 100)]


@pytest.fixture(params=SPLITS, ids=str)
def tuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    """A table with an entry for the "GPU" that tensors on a CPU are on."""
    heads = Heads(1, BATCH.group, BATCH.head_dim, 4)
    entry = Entry("", (9, 0), "decode", heads, SMALL, request.param)
    monkeypatch.setattr(tuning, "_table", lambda: {entry.key: entry})
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    tuning.decode.cache_clear()
    yield entry
    tuning.decode.cache_clear()


def attend(case: Case, which: slice = slice(None)) -> torch.Tensor:
    i = case.inputs
    return kernels.paged_decode(
        i.q[which], i.k_cache, i.v_cache, i.block_tables[which], i.context_lens[which],
        scale=case.scale, window=case.window,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 40])
def test_a_sequence_alone_and_in_a_batch(tuned: Entry, window: int | None) -> None:
    case = replace(BATCH, window=window)
    together = attend(case)
    check(together, case)
    for n in range(len(case.sequences)):
        assert torch.equal(attend(case, slice(n, n + 1)), together[n : n + 1])


def test_a_chunk_alone_and_in_a_batch() -> None:
    """In launches for the same longest chunk, which is what its tiles depend on."""
    case = Case(((20, 90), (7, 7), (33, 50), (1, 40)), kv_heads=1, head_dim=32)
    i = case.inputs
    rest: dict[str, Any] = {"scale": case.scale, "max_query_len": 33}
    args = (i.k_cache, i.v_cache)
    together = attention.paged_attention(
        i.q, *args, i.block_tables, i.query_start, i.context_lens, **rest
    )
    check(together, case)
    for n in range(len(case.sequences)):
        begin, end = i.query_start[n : n + 2].tolist()
        alone = attention.paged_attention(
            i.q[begin:end], *args, i.block_tables[n : n + 1],
            i.query_start[n : n + 2] - begin, i.context_lens[n : n + 1], **rest,
        )  # fmt: skip
        assert torch.equal(alone, together[begin:end])


@pytest.mark.parametrize(
    ("split", "parts"), [(Split(16), 10), (Split(4), 4), (Split(8, 3), 4), (Split(2, 100), 1)]
)
def test_short_contexts_make_fewer_parts(
    split: Split, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 keys are ten tiles of 16."""
    case = replace(BATCH, sequences=((1, 150),))
    marks: list[torch.Tensor] = []
    new_empty = torch.Tensor.new_empty

    def kept(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = new_empty(self, *args, **kwargs)
        if made.is_floating_point():
            marks.append(made.fill_(torch.nan))
        return made

    i = case.inputs
    monkeypatch.setattr(torch.Tensor, "new_empty", kept)
    decode.paged_decode(
        i.q, i.k_cache, i.v_cache, i.block_tables, i.context_lens,
        scale=case.scale, tiles=SMALL, split=split,
    )  # fmt: skip
    (peaks, _), heads = marks[1], case.group
    assert int((~peaks.isnan()).sum()) == parts * heads
