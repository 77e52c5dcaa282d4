"""Bad trace files: one line each, with the file, its line, the value and what is allowed."""

from pathlib import Path
from typing import Any

import pytest

from pagedsim.workload import trace
from pagedsim.workload.traces import jsonlines
from tests.core.refusals import refusal
from tests.workload.files import (
    AZURE_2023,
    BAILIAN,
    LENGTHS,
    MOONCAKE,
    PLAIN,
    SHAREGPT,
    TURNS,
    packed,
    written,
)

HEADER = PLAIN.splitlines()[0]
OWN = "when,in,out\n0,5,5\n"
COLUMNS = {"arrival": "when", "prompt": "in", "output": "out"}
BURST = {"arrivals": "burst"}
CHATS = {"format": "sharegpt", "tokenizer": len, **BURST}


def complaint(path: str, named: str, **settings: Any) -> str:
    """The error of reading this file, which names all of these."""
    return refusal(lambda: trace(path=path, **settings), named)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("17.5,ten,10", "num_prefill_tokens='ten' | a whole number of tokens"),
        ("17.5,10,2.5", "num_decode_tokens='2.5' | a whole number of tokens"),
        ("17.5,10,3000000000", "num_decode_tokens=3000000000 | at most 1073741823"),
        ("1e999,10,10", "arrived_at='1e999' | a finite number"),
        ("17.5,1_0,10", "num_prefill_tokens='1_0' | a whole number of tokens"),
        ("1.7e12,10,10", "arrived_at is 1.7e+12 s | from 0 to 1e+10 s"),
        ("16.25,10,10", "arrived_at is 0.25 s before the row above | must not decrease"),
        ("17.5,1,000,10", "4 columns | 3, as in the header"),
    ],
)
def test_one_bad_row(tmp_path: Path, row: str, named: str) -> None:
    """Row 1 of 20 is line 2 of the file."""
    rows = [f"{i}.5,10,10" for i in range(1, 21)]
    rows[16] = row
    path = written(tmp_path, "\n".join([HEADER, *rows]))
    assert complaint(path, named).startswith(f"{path}:18: ")


AZURE = AZURE_2023.replace("GeneratedTokens", "GeneratedToken")
TWICE = "arrived_at,num_prefill_tokens,num_decode_tokens,num_decode_tokens,,\n0,5,5,9,,\n"
QUOTED = 'a,arrived_at,num_prefill_tokens,num_decode_tokens\n"1\n2",0,5,5\n\n"3\n4",1,x,5\n'
URGENT = "arrived_at,num_prefill_tokens,num_decode_tokens,p\n0,5,5,1\n1,5,5,{}\n"
FILES: list[tuple[str, dict[str, Any], str]] = [
    # columns
    (AZURE, {}, ":1: no column 'GeneratedTokens' (format azure) | did you mean 'GeneratedToken'?"),
    (AZURE, {"format": "burstgpt"}, ":1: no column 'Request tokens' (format burstgpt)"),
    (PLAIN, {"columns": {"client": "who"}}, "no column 'who'"),
    (OWN, {"columns": COLUMNS | {"arrival": "wen"}}, ":1: columns.arrival | 'wen' | 'when'?"),
    (OWN, {"columns": {"arrival": "when"}}, ":1: columns.prompt | 'num_prefill_tokens'"),
    (OWN, {}, "columns.arrival, .prompt and .output name those of another"),
    (OWN + "noon,5,5\n", {"columns": COLUMNS}, ":3: when='noon' | a finite number"),
    ("when,in,in\n0,5,5\n", {"columns": COLUMNS | {"output": "in"}}, "columns.output | 2 times"),
    (TWICE, {}, ":1: column 'num_decode_tokens' is there 2 times | once"),
    (URGENT.format("nan"), {"columns": {"priority": "p"}}, ":3: p='nan' | a finite number"),
    (URGENT.format("high"), {"columns": {"priority": "p"}}, ":3: p='high' | a finite number"),
    # tables
    ("", {}, "the file is empty"),
    ("\n\n", {}, "the file is empty"),
    (HEADER + "\n", {}, "holds no requests"),
    ("[]", CHATS, "holds no requests"),
    ("a,b\n1,2\n", {}, ":1: no known format has columns a, b (azure: TIMESTAMP,"),
    ("a,b\n1,2\n", {"format": "azur"}, "did you mean 'azure'"),
    (PLAIN.replace("1.0,200", "\n\n1.0,x"), {}, ":5: num_prefill_tokens='x'"),
    (QUOTED, {}, ":5: num_prefill_tokens='x'"),
    (PLAIN.replace("1.0,300,30", f'"{"x" * 200_000}",1,1'), {}, ":4: not CSV | field larger"),
    ("x" * 200_000, {}, ":1: not CSV: field larger than"),
    (PLAIN.replace(",", ";"), {}, "num_decode_tokens | must be separated by commas"),
    (PLAIN.replace(",", "\t"), {"format": "plain"}, "must be separated by commas"),
    ("\0\1\n", {}, "columns '\\x00\\x01'"),
    # JSON lines
    (MOONCAKE.replace("3]}", '3], "extra": 3}'), {}, ":2: extra=3 | an object"),
    (MOONCAKE.replace("3]}", '3], "extra": [1]}'), {}, ":2: extra=[1] | an object"),
    (MOONCAKE.replace('"hash_ids": [0, 3]', '"hash": [0, 3]'), {}, ":2: no field 'hash_ids'"),
    (MOONCAKE.replace("[0, 3]", '[0, "3"]'), {}, ':2: hash_ids=[0, "3"] | whole numbers'),
    (MOONCAKE.replace("[0, 3]", "[0]"), {}, ":2: hash_ids has 1 block | input_length=1000"),
    (MOONCAKE.replace("250", "1" + "0" * 400), {}, ":2: timestamp=1000000000"),
    (MOONCAKE.replace("250", "-250"), {}, ":2: timestamp is -0.25 s | from 0 to 1e+10 s"),
    (MOONCAKE.replace("[0, 3]", "[" * 100_000), {}, ":2: not JSON | lists too deep"),
    (MOONCAKE.replace("250", "4000"), {}, ":3: timestamp is 1 s before the row above"),
    (BAILIAN.replace("[1, 2, 3]", "[1, 2]"), {}, ":1: hash_ids has 2 blocks | input_length=40"),
    (BAILIAN.replace('id": 7, "t', 'id": "7", "t'), {}, ":3: parent_chat_id= | a whole number"),
    (TURNS.replace('"b"', "null"), {}, ":2: session_id=null | a name or a whole number"),
    # JSON
    ('{"a": 1}', CHATS, ":1: must be a list of objects with conversations"),
    ('[{"conversations": [1, 2]}]', CHATS, ": entry 1: each turn must have a text"),
    ('["a', CHATS, ":1: not JSON: Unterminated string starting at column 2"),
    (SHAREGPT.replace("a b", ""), CHATS, ": entry 3: tokens of the first turn=0 | at least 1"),
    # settings that a format has no use for, and what it lacks
    (MOONCAKE, {"where": {"a": "b"}}, "where={'a': 'b'} | format mooncake | azure, burstgpt"),
    (MOONCAKE, {"columns": {"arrival": "t"}}, "columns={'arrival': 't'} | format mooncake"),
    (MOONCAKE, {"columns": {"extra": ["t"]}}, "columns.extra={'t': 't'} | format mooncake"),
    (MOONCAKE, {"tokenizer": "gpt2"}, "tokenizer=gpt2 | format mooncake | sharegpt"),
    (PLAIN, {"tokenizer": len}, "tokenizer: format plain has no use for it"),
    (LENGTHS, {"columns": {"arrival": "t"}, "format": "lengths"}, "columns.arrival | no times"),
    (LENGTHS, {"start": 5, **BURST}, "format lengths has no times"),
    (LENGTHS, {}, "has lengths but no times: set arrivals="),
    (HEADER + "\n1,5,5\n1,5,5\n", {"rate": 2.0}, "come at once"),
    (SHAREGPT, BURST, "tokenizer: format sharegpt holds text"),
]


@pytest.mark.parametrize(("text", "settings", "named"), FILES, ids=[row[-1] for row in FILES])
def test_a_bad_file(tmp_path: Path, text: str, settings: dict[str, Any], named: str) -> None:
    complaint(written(tmp_path, text), named, **settings)


def test_a_column_that_is_there_twice_may_be_one_of_no_use(tmp_path: Path) -> None:
    assert len(trace(path=written(tmp_path, TWICE.replace("tokens,num_decode_tokens", "tokens,x"))))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN, "requests.csv")
    near = str(tmp_path / "request.csv")
    complaint(near, f"path={near} | there is no such file | did you mean {path}?")
    complaint(str(tmp_path), "is a folder")
    complaint(str(tmp_path / "x" / "y.csv"), "there is no folder")
    complaint("~no-user-of-that-name/y.csv", "there is no folder")
    complaint("x" * 5000, "File name too long")
    complaint("/dev/null", "is not a plain file")
    refusal(lambda: trace(path=None), "path: must name a trace file")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00\x01" * 50, PLAIN.encode() + b"5.0,\x00\xff,3\n"]
)
def test_files_that_are_not_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    complaint(str(path), "not a text file in UTF-8")


def test_damaged_gzip_files(tmp_path: Path) -> None:
    path = Path(packed(tmp_path, PLAIN * 500))
    whole = path.read_bytes()
    for damaged in (whole[:-30], whole[:40] + b"nonsense" + whole[48:], whole[:2] + b"x" * 50):
        path.write_bytes(damaged)
        complaint(str(path), f"{path}: packed by gzip, but damaged")


@pytest.mark.parametrize("old", ["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690"])
@pytest.mark.parametrize(
    "time",
    ["yesterday", "NaT", "1700158550", "2023-11-16", "2023-11-16 25:00:00", "1500-11-16 18:15:50"],
)
def test_invalid_dates(tmp_path: Path, old: str, time: str) -> None:
    line = 2 if "46" in old else 3
    named = f":{line}: TIMESTAMP={time!r} | a date and time of the years 1700 to 2199"
    complaint(written(tmp_path, AZURE_2023.replace(old, time)), named)


def test_sharegpt_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, SHAREGPT)

    def counting(text: str) -> int:
        raise AssertionError("nothing is counted in vain")

    complaint(path, "has lengths but no times", tokenizer=counting)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(jsonlines, "import_module", missing)
    named = "tokenizer=gpt2: needs tokenizers, which is not installed: pip "
    complaint(path, named, tokenizer="gpt2", **BURST)
