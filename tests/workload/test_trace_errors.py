"""Bad trace files: one line each, with the file, its line, the value and what is allowed."""

from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.workload import trace
from pagedsim.workload.traces import jsonlines
from tests.workload.files import AZURE_2023, LENGTHS, MOONCAKE, PLAIN, SHAREGPT, packed, written

HEADER = PLAIN.splitlines()[0]


def complaint(path: str, **settings: Any) -> str:
    """The error of reading this file, as a user sees it."""
    with pytest.raises(ConfigError) as error:
        trace(path=path, **settings)
    text = str(error.value)
    assert "\n" not in text
    return text


def rows_with(row: int, text: str) -> str:
    """A plain file of 20 good rows, but for one: row 1 is line 2 of the file."""
    rows = [f"{i}.5,10,10" for i in range(1, 21)]
    rows[row - 1] = text
    return "\n".join([HEADER, *rows])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("17.5,ten,10", ":18: num_prefill_tokens='ten': must be a whole number of tokens"),
        ("17.5,10,2.5", ":18: num_decode_tokens='2.5': must be a whole number of tokens"),
        ("17.5,10,3000000000", ":18: num_decode_tokens=3000000000: must be at most 1073741823"),
        ("1e999,10,10", ":18: arrived_at='1e999': must be a finite number"),
        ("17.5,1_0,10", ":18: num_prefill_tokens='1_0': must be a whole number of tokens"),
        ("1.7e12,10,10", ":18: arrived_at is 1.7e+12 s: must be from 0 to 1e+10 s"),
        ("16.25,10,10", ":18: arrived_at is 0.25 s before the row above: times must not decrease"),
        ("17.5,1,000,10", ":18: 4 columns: must be 3, as in the header"),
    ],
)
def test_one_bad_row(tmp_path: Path, row: str, message: str) -> None:
    path = written(tmp_path, rows_with(17, row))
    assert complaint(path).startswith(path + message)


def test_a_missing_column(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE_2023.replace("GeneratedTokens", "GeneratedToken"))
    assert complaint(path) == (
        f"{path}:1: no column 'GeneratedTokens' (format azure): its columns are TIMESTAMP, "
        "ContextTokens, GeneratedToken; did you mean 'GeneratedToken'?"
    )
    assert "no column 'Timestamp' (format burstgpt)" in complaint(path, format="burstgpt")
    assert "no column 'who'" in complaint(written(tmp_path, PLAIN), columns={"client": "who"})


def test_a_missing_column_of_one_s_own(tmp_path: Path) -> None:
    path = written(tmp_path, "when,in,out\n0,5,5\n")
    columns = {"arrival": "wen", "prompt": "in", "output": "out"}
    assert complaint(path, columns=columns) == (
        f"{path}:1: columns.arrival: no column 'wen': its columns are when, in, out; "
        "did you mean 'when'?"
    )
    assert complaint(path, columns={"arrival": "when"}) == (
        f"{path}:1: columns.prompt: no column 'num_prefill_tokens': its columns are when, in, out"
    )
    assert "columns.arrival, .prompt and .output name those of another" in complaint(path)
    twice = written(tmp_path, "when,in,in\n0,5,5\n")
    columns = {"arrival": "when", "prompt": "in", "output": "in"}
    assert "columns.output: column 'in' is there 2 times" in complaint(twice, columns=columns)
    late = written(tmp_path, "when,in,out\n0,5,5\nnoon,5,5\n")
    columns = {"arrival": "when", "prompt": "in", "output": "out"}
    assert complaint(late, columns=columns) == f"{late}:3: when='noon': must be a finite number"


@pytest.mark.parametrize("value", ["3", '"a"', "[1]", "false"])
def test_what_json_lines_carry_is_an_object(tmp_path: Path, value: str) -> None:
    one, two, _ = MOONCAKE.splitlines()
    path = written(tmp_path, "\n".join([one, two.replace("}", f', "extra": {value}}}')]))
    assert complaint(path) == f"{path}:2: extra={value}: must be an object"


def test_empty_files(tmp_path: Path) -> None:
    assert "the file is empty" in complaint(written(tmp_path, ""))
    assert "the file is empty" in complaint(written(tmp_path, "\n\n"))
    assert "holds no requests" in complaint(written(tmp_path, HEADER + "\n"))
    assert "holds no requests" in complaint(
        written(tmp_path, "[]"), tokenizer=len, arrivals="burst"
    )


def test_unknown_formats(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b\n1,2\n")
    text = complaint(path)
    assert text.startswith(f"{path}:1: no known format has columns a, b (azure: TIMESTAMP,")
    assert "did you mean 'azure'" in complaint(path, format="azur")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN, "requests.csv")
    near = str(tmp_path / "request.csv")
    assert complaint(near) == f"path={near}: there is no such file; did you mean {path}?"
    assert "is a folder" in complaint(str(tmp_path))
    assert "there is no folder" in complaint(str(tmp_path / "x" / "y.csv"))
    assert "there is no folder" in complaint("~no-user-of-that-name/y.csv")
    assert "File name too long" in complaint("x" * 5000)
    assert "is not a plain file" in complaint("/dev/null")
    with pytest.raises(ConfigError, match="path: must name a trace file"):
        trace(path=None)


def test_files_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00\x01" * 50)
    assert "not a text file in UTF-8" in complaint(str(path))
    path.write_bytes(PLAIN.encode() + b"5.0,\x00\xff,3\n")
    assert "not a text file in UTF-8" in complaint(str(path))


def test_lines_are_counted_with_blank_ones_and_those_inside_a_cell(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN.replace("1.0,200", "\n\n1.0,x"))
    assert ":5: num_prefill_tokens='x'" in complaint(path)
    text = 'a,arrived_at,num_prefill_tokens,num_decode_tokens\n"1\n2",0,5,5\n\n"3\n4",1,x,5\n'
    assert ":5: num_prefill_tokens='x'" in complaint(written(tmp_path, text))
    assert ":4: not CSV from here on: field larger" in complaint(
        written(tmp_path, PLAIN.replace("1.0,300,30", f'"{"x" * 200_000}",1,1'))
    )


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens,num_decode_tokens,,\n0,5,5,9,,\n"
    path = written(tmp_path, text)
    assert complaint(path) == (
        f"{path}:1: column 'num_decode_tokens' is there 2 times: must be there once"
    )
    assert len(trace(path=written(tmp_path, text.replace("tokens,num_decode_tokens", "tokens,x"))))


def test_files_that_are_no_table(tmp_path: Path) -> None:
    text = complaint(written(tmp_path, PLAIN.replace(",", ";")))
    assert "num_decode_tokens (columns must be separated by commas)" in text
    text = complaint(written(tmp_path, PLAIN.replace(",", "\t")), format="plain")
    assert text.endswith("(columns must be separated by commas)")
    assert "columns '\\x00\\x01'" in complaint(written(tmp_path, "\0\1\n"))
    assert ":1: not CSV: field larger than" in complaint(written(tmp_path, "x" * 200_000))


def test_damaged_gzip_files(tmp_path: Path) -> None:
    path = Path(packed(tmp_path, PLAIN * 500))
    whole = path.read_bytes()
    for damaged in (whole[:-30], whole[:40] + b"nonsense" + whole[48:], whole[:2] + b"x" * 50):
        path.write_bytes(damaged)
        assert complaint(str(path)) == f"{path}: packed by gzip, but damaged or not whole"


def test_azure_times(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE_2023.replace("2023-11-16 18:15:50.9951690", "yesterday"))
    assert complaint(path) == (
        f"{path}:3: TIMESTAMP='yesterday': must be a date and time of the years 1700 to 2199, "
        "as in 2023-11-16 18:15:46.68"
    )


@pytest.mark.parametrize(
    "time", ["NaT", "1700158550", "2023-11-16", "2023-11-16 25:00:00", "1500-11-16 18:15:50"]
)
def test_invalid_dates(tmp_path: Path, time: str) -> None:
    path = written(tmp_path, AZURE_2023.replace("2023-11-16 18:15:50.9951690", time))
    assert complaint(path).startswith(f"{path}:3: TIMESTAMP={time!r}: must be a date and time of")
    first = written(tmp_path, AZURE_2023.replace("2023-11-16 18:15:46.6805900", time))
    assert complaint(first).startswith(f"{first}:2: TIMESTAMP={time!r}: must be a date and time of")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"hash_ids": [0, 3]', '"hash": [0, 3]', ":2: no field 'hash_ids' (format mooncake)"),
        ("[0, 3]", '[0, "3"]', ':2: hash_ids=[0, "3"]: must be a list of whole numbers'),
        ("[0, 3]", "[0]", ":2: hash_ids has 1 blocks, input_length=1000 tokens: must be one for"),
        ("250", "1" + "0" * 400, ":2: timestamp=1000000000"),
        ("250", "-250", ":2: timestamp is -0.25 s: must be from 0 to 1e+10 s"),
        ("[0, 3]", "[" * 100_000, ":2: not JSON: a number too long, or lists too deep"),
        ("250", "4000", ":3: timestamp is 1 s before the row above"),
    ],
)
def test_bad_mooncake_lines(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MOONCAKE
    path = written(tmp_path, MOONCAKE.replace(old, new, 1))
    assert complaint(path, format="mooncake").startswith(path + message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', ":1: must be a list of objects with conversations"),
        ('[{"conversations": [1, 2]}]', ": entry 1: each turn must have a text as its value"),
        ('["a', ":1: not JSON: Unterminated string starting at column 2"),
        (SHAREGPT.replace("a b", ""), ": entry 3: tokens of the first turn=0: must be at least 1"),
    ],
)
def test_bad_sharegpt_files(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    found = complaint(path, format="sharegpt", tokenizer=len, arrivals="burst")
    assert found.startswith(path + message)


def test_sharegpt_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, SHAREGPT)
    assert "tokenizer: format sharegpt holds text" in complaint(path, arrivals="burst")

    def counting(text: str) -> int:
        raise AssertionError("nothing is counted in vain")

    assert "has lengths but no times" in complaint(path, tokenizer=counting)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(jsonlines, "import_module", missing)
    text = complaint(path, arrivals="burst", tokenizer="gpt2")
    assert text.startswith("tokenizer=gpt2: needs tokenizers, which is not installed: pip ")


@pytest.mark.parametrize("value", ["nan", "high"])
def test_priorities_of_a_file_are_finite_numbers(tmp_path: Path, value: str) -> None:
    text = f"arrived_at,num_prefill_tokens,num_decode_tokens,p\n0,5,5,1\n1,5,5,{value}\n"
    path = written(tmp_path, text)
    assert (
        complaint(path, columns={"priority": "p"})
        == f"{path}:3: p={value!r}: must be a finite number"
    )


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (MOONCAKE, {"where": {"a": "b"}}, "where={'a': 'b'}: format mooncake has no use for it; "
         "formats that have: azure, burstgpt, "),

        (MOONCAKE, {"columns": {"arrival": "t"}}, "columns={'arrival': 't'}: format mooncake has "),
        (MOONCAKE, {"columns": {"extra": ["t"]}}, "columns.extra={'t': 't'}: format mooncake has "),
        (LENGTHS, {"columns": {"arrival": "t"}, "format": "lengths"},
         "columns.arrival: format lengths has no times"),
        (MOONCAKE, {"tokenizer": "gpt2"}, "tokenizer=gpt2: format mooncake has no use for it; "
         "formats that have: sharegpt"),
        (PLAIN, {"tokenizer": len}, "tokenizer: format plain has no use for it"),


    ],
)  # fmt: skip
def test_settings_that_a_format_ignores(
    tmp_path: Path, text: str, settings: dict, message: str
) -> None:
    assert message in complaint(written(tmp_path, text), arrivals="burst", **settings)


def test_a_window_into_a_file_without_times(tmp_path: Path) -> None:
    path = written(tmp_path, LENGTHS)
    assert "format lengths has no times" in complaint(path, start=5, arrivals="burst")
    burst = HEADER + "\n1,5,5\n1,5,5\n"
    assert "come at once" in complaint(written(tmp_path, burst), rate=2.0)
