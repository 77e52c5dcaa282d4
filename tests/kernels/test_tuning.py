"""The tuning tables: what is looked up, and that every line of them can be used on its GPU."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedsim.kernels import tuning
from pagedsim.kernels.tiles import (
    MIN_ROWS,
    PROGRAMS,
    Split,
    Tiles,
    decode_split,
    decode_tiles,
    fitted,
    power_of_two,
    prefill_tiles,
    product_tiles,
)
from pagedsim.kernels.tuning import Entry, Heads
from tests.kernels.test_compile import taken

CPU = torch.device("cpu")
LLAMA = Heads(8, 4, 128, 2)
PREFILL = Entry("", (9, 0), "prefill", LLAMA, Tiles(64, 128, 4, 3), measured={"date": "today"})
DECODE = Entry("", (9, 0), "decode", LLAMA, Tiles(16, 128, 8, 7), Split(512, 32))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entries for the GPU without a name, which is none."""
    monkeypatch.setattr(tuning, "_table", lambda: {one.key: one for one in (PREFILL, DECODE)})
    tuning.decode.cache_clear()
    yield
    tuning.decode.cache_clear()


def test_where_nothing_was_measured_defaults_are_taken() -> None:
    heads = Heads(8, 3, 80, 2)
    assert tuning.prefill(CPU, heads, 100) == prefill_tiles(80, 3, 2, (9, 0), 100)
    assert tuning.decode(CPU, heads) == (decode_tiles(80, 3, 2, (9, 0)), Split(1024, 128))
    parts = {kv_heads: decode_split(kv_heads) for kv_heads in (1, 2, 4, 6, 32)}
    assert {kv_heads: split.part for kv_heads, split in parts.items()} == {
        **{1: 256, 2: 256, 4: 512},
        **{6: 1024, 32: 1024},
    }


@pytest.mark.usefixtures("table")
def test_what_was_measured_is_taken() -> None:
    assert tuning.decode(CPU, LLAMA) == (DECODE.tiles, DECODE.split)
    assert tuning.prefill(CPU, LLAMA, 16) == PREFILL.tiles
    assert tuning.prefill(CPU, LLAMA, 4000) == PREFILL.tiles


@pytest.mark.usefixtures("table")
def test_short_queries_get_fewer_rows_and_the_same_keys() -> None:
    assert tuning.prefill(CPU, LLAMA, 1) == Tiles(16, 128, 4, 3)
    assert tuning.prefill(CPU, LLAMA, 5) == Tiles(32, 128, 4, 3)


def test_the_committed_table_can_be_used() -> None:
    """What a kernel would refuse, or misread, at its first launch on that GPU."""
    for entry in tuning.read():
        says = json.dumps(tuning._line(entry))
        tiles, (part, most) = entry.tiles, entry.split
        assert entry.kernel in tuning.KERNELS, says
        assert entry.gpu and entry.measured, says
        for size in (tiles.rows, tiles.keys, tiles.warps, most):
            assert size == power_of_two(size) > 0, says
        assert tiles.rows >= max(MIN_ROWS, power_of_two(entry.heads.group)), says
        assert tiles.keys >= MIN_ROWS and tiles.stages in (2, 3, 5, 7), says
        assert entry.kernel == "prefill" or part % tiles.keys == 0, says


def calls(entry: Entry) -> list[dict[str, Any]]:
    """What the engine may launch of an entry."""
    head_dim, group = entry.heads.head_dim, entry.heads.group
    call = {"dtype": "bfloat16", "head_dim": head_dim, "group": group, "cache": entry.heads.cache}
    if entry.kernel == "decode":
        tiles, split = vars(entry.tiles), entry.split._asdict()
        return [{**call, "kernel": "decode", "queries": 8, "tiles": tiles, "split": split}]
    return [
        {
            **call,
            "kernel": "attention",
            "queries": queries,
            "tiles": vars(
                fitted(entry.tiles, head_dim, group, queries, entry.heads.cache != "auto")
            ),
        }
        for queries in sorted({max(1, rows // power_of_two(group)) for rows in (16, 32, 64, 128)})
    ]


def faults(*entries: Entry) -> list[str]:
    """What is wrong with entries of one GPU."""
    from pagedsim.experiments.benchmarks.fake_gpu import (
        SHARED,  # where Triton is not installed, nor is that
    )

    ((major, minor),) = {entry.capability for entry in entries}
    target, asked = major * 10 + minor, [call for entry in entries for call in calls(entry)]
    found = []
    for call, launched in zip(asked, taken(asked, target), strict=True):
        for kernel in launched:
            if kernel["spilled"]:
                found.append(f"spills: {call}: {kernel}")
            if kernel["shared"] > SHARED[target]:
                found.append(f"too much shared memory: {call}: {kernel}")
    return found


@pytest.mark.slow
def test_every_entry_compiles_for_its_gpu() -> None:
    halves = [entry for entry in tuning.read() if entry.heads.itemsize == 2]
    assert [fault for entry in halves for fault in faults(entry)] == []


@pytest.mark.parametrize("split", [Split(), Split(256, 16), Split(512, 256)])
def test_parts_cover_a_context(split: Split) -> None:
    edges = [
        split.part * n + more for n in (1, 2, split.most, 3 * split.most) for more in (-1, 0, 1)
    ]
    for context in (0, 1, *edges, 131072):
        size, parts = split.size(context), split.parts(context)
        assert size % split.part == 0 and 1 <= parts <= split.bound(context) <= split.most
        assert (parts - 1) * size < max(context, 1) <= parts * size


# Products


def test_defaults_of_products_are_powers_of_two() -> None:
    for tokens, outputs, itemsizes, capability, gated, cut in itertools.product(
        (1, 17, 33, 4096),
        (1, 40, 6144, 128256),
        ((2, 2), (2, 1), (4, 4)),
        ((8, 0), (8, 9), (9, 0), (12, 0)),
        (False, True),
        (False, True),
    ):
        one = product_tiles(tokens, outputs, 4096, itemsizes, capability, gated, cut)
        sizes = (one.rows, one.columns, one.depth, one.warps, one.parts)
        assert all(size & (size - 1) == 0 for size in sizes)
        assert min(sizes[:3]) >= 16 and 2 <= one.stages <= 7
        if one.parts > 1:  # as many counters as `done` has, for one tile of tokens
            assert cut and tokens <= one.rows and -(-outputs // one.columns) <= PROGRAMS
