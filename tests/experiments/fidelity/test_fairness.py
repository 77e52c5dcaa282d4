"""Two logs of a server: what is reported of clients, what is predicted, and what is refused."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.experiments.fidelity.fairness import DATA, _alike
from pagedsim.experiments.fidelity.fairness_pair import Paired, Side, Weights, WeightsFit
from pagedsim.fidelity.logs.log import Latencies, Log, read_log
from pagedsim.fidelity.logs.score import ClientService
from tests.run.studies import carried_out

LOGS = DATA / "slora-vtc"
QUICK = (
    *("experiment=fairness", "model=llama-2-7b", "hardware=a10g", "memory.blocks=10000"),
    *(
        "study.known=20",
        "study.least=20",
        "study.moves=2",
        "study.more=[]",
        "report=false",
        "jobs=1",
    ),
)


def log(rows: Sequence[tuple[float, str, int, int, float, float]]) -> Log:
    arrived, client, prompt, output, ttft, e2e = map(list, zip(*rows, strict=True))
    times = Latencies(np.array(ttft), np.array(e2e), np.array(output))
    places = [str(row) for row in range(len(rows))]
    return Log(Path("none"), places, np.array(arrived), np.array(prompt), times, client)


def cut(name: str, folder: Path, rows: int) -> Path:
    """The beginning of a log."""
    path = folder / name.removesuffix(".gz")
    with gzip.open(LOGS / name, "rt") as file:
        path.write_text("".join(line for _, line in zip(range(rows + 1), file, strict=False)))
    return path


@pytest.mark.parametrize(
    ("name", "light", "gap"),
    [
        ("a10g-overload-fcfs", 484.9, 263_300),
        ("a10g-overload-vtc", 124.5, 7_940),
        ("a10g-on_off_less-fcfs", 85.25, None),
        ("a10g-proportional-vtc", 4.76, None),
        ("a100-13b-overload-vtc", 91.04, 71_260),
    ],
)
def test_the_logs_have_the_published_numbers(name: str, light: float, gap: float | None) -> None:
    of = read_log(LOGS / f"{name}.csv.gz")
    told = ClientService(of, of.latencies)
    assert told.light == "0"
    assert told.ttft("0") == pytest.approx(light, rel=2e-3)
    if gap is not None:
        assert told.gap == pytest.approx(gap, rel=2e-3)


def test_two_logs_of_the_command_line(tmp_path: Path) -> None:
    """Two logs as they are, named on the command line."""
    fcfs = cut("a10g-overload-fcfs.csv.gz", tmp_path, 80)
    vtc = cut("a10g-overload-vtc.csv.gz", tmp_path, 70)
    words = (*QUICK, f"study.fcfs={fcfs}", f"study.other={vtc}", "study.more=[drr]")
    found = carried_out(tmp_path / "out", *words)
    (pair,) = found["data"]["pairs"].values()
    assert set(pair["logs"]) == {"fcfs", "vtc"}
    assert {"measured", "simulated", "drr", "admission at every step"} < set(pair["logs"]["vtc"])
    # S-LoRA's rules decide admission, so that even a hasty fit comes near.
    for side in pair["logs"].values():
        measured, simulated = side["measured"], side["simulated"]
        assert simulated["light"] == pytest.approx(measured["light"], rel=0.2)
        assert simulated["rate"] == pytest.approx(measured["rate"], rel=0.1)
    assert pair["logs"]["vtc"]["simulated"]["light"] < pair["logs"]["fcfs"]["simulated"]["light"]
    assert {row["what"].split(":")[0] for row in found["rows"]} == {
        "your logs, FCFS",
        "your logs, VTC",
    }
    assert all(row["published"] is not None for row in found["rows"])


def test_notes_on_a_pair_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file twice, on a server that is not the log's; settings that the logs decide."""
    fcfs = cut("a10g-overload-fcfs.csv.gz", tmp_path, 30)
    words = [*QUICK, f"study.fcfs={fcfs}", f"study.other={fcfs}", "batching.max_wait_tokens=0"]
    words += ["study.more_prompt=0", "study.adapter=0", "study.cold=false", "server.max_seqs=1"]
    words += ["server.max_batched_tokens=4000", "workload.rate=4", "seeds=3"]
    found = carried_out(tmp_path / "out", *words)
    assert found["finding"][1].startswith("your logs: even requests that were fitted are ")
    same = "one file is both logs: what is measured under VTC is that under FCFS"
    assert f"your logs: {same}" in found["notes"]
    # Assumptions are varied where they are not as clients would have it, and only then.
    (pair,) = found["data"]["pairs"].values()
    assert set(pair["logs"]["vtc"]) == {"measured", "simulated", "steps as long as in this log"}
    said = " ".join(capsys.readouterr().out.split())
    assert "workload.rate=4 changes nothing: the requests are those of the logs" in said
    assert "seeds=3 changes nothing: the logs are served once" in said
    assert "Measured and simulated" in said and "published" not in said.lower()


def test_logs_with_different_clients_are_noted() -> None:
    first, other = (
        log([(0.0, name, 10, 10, 1.0, 10.0), (0.0, "b", 10, 10, 1.0, 20.0)]) for name in "ac"
    )
    sides = []
    for policy, one, path in (("fcfs", first, Path(__file__)), ("vtc", other, DATA)):
        got = ClientService(replace(one, path=path), one.latencies)  # paths that exist
        sides.append(Side(policy, got, got))
    found = WeightsFit(Weights(*[1.0] * 6), 1, 0.0)
    (note,) = _alike(Paired("mine", {}, found, sides[0], sides[1], 1.0))
    assert note == (
        "mine: clients are not the same in both logs, so that little can be held against each "
        "other: a only under FCFS; c only under VTC"
    )


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        carried_out(Path("never"), "experiment=fairness", "report=false", *words)
    return str(error.value)


def change(line: int, to: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [*lines[:line], to, *lines[line + 1 :]]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (change(5, "9,0,256,256,3,2"), "{path}:6: arrives at 9, has its first token at 12"),
        (change(5, "9,,256,256,3,12"), "{path}:6: client is empty: must be a name"),
        (lambda lines: lines[:1], "study.fcfs={path}: holds no requests"),
        (lambda lines: lines[:9], "study.fcfs={path}: 8 requests within"),
        (
            lambda lines: [lines[0], *(one.replace(",0,", ",1,") for one in lines[1:])],
            "study.fcfs={path}: names fewer than two clients",
        ),
        (
            lambda lines: [lines[0], *(f"{row},{row % 2},9,1,2,2" for row in range(30))],
            "study.fcfs={path}: has no answer of two tokens or more",
        ),
    ],
)
def test_bad_logs_are_refused_with_the_line(
    edit: Callable[[list[str]], list[str]], says: str, tmp_path: Path
) -> None:
    path = cut("a10g-overload-fcfs.csv.gz", tmp_path, 40)
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
    said = refused(f"study.fcfs={path}", f"study.other={path}", "memory.blocks=10000")
    assert said.startswith(says.format(path=path))


def test_a_pool_that_adapters_fill_is_refused(tmp_path: Path) -> None:
    fcfs = cut("a10g-overload-fcfs.csv.gz", tmp_path, 30)
    words = [*QUICK, f"study.fcfs={fcfs}", f"study.other={fcfs}", "study.adapter=5000"]
    with pytest.raises(ConfigError, match="a pool of 10,000 tokens holds no more than the adapt"):
        carried_out(tmp_path / "out", *words)
    words[-1], says = "memory.blocks=436", "of the pool's 436 tokens the adapters of 2 clients ta"
    with pytest.raises(ConfigError, match=f"memory of 372 blocks × 1 tokens .*{says}"):
        carried_out(tmp_path / "small", *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["study.fcfs=nowhere.csv"], "fcfs, other: two logs make a pair"),
        (["study.fcfs=no.csv", "study.other=no.csv"], "memory.blocks: must be given"),
        (
            ["study.fcfs=no.csv", "study.other=no.csv", "memory.blocks=9"],
            "study.fcfs=no.csv: there is no such file",
        ),
        (["study.policy=fcfs"], "policy=fcfs, more=['drr']: must be different policies"),
        (["policy=vtc", "~policy.reserve"], "policy: must be one that wraps another"),
        (["study.known=0"], "known=0: must be a number above 0"),
        (["+study.pairs={a: {machine: T4, fcfs: x, other: y}}"], "study.pairs.a.machine=T4: must"),
        (
            ["+study.pairs={a: {fcfs: x}}"],
            "study.pairs.a: has fcfs: must have machine, fcfs, other",
        ),
        (["study.more=[quickest]"], "study.more=quickest: unknown; choose from "),
    ],
)
def test_invalid_settings_are_refused(words: list[str], says: str) -> None:
    assert says in refused(*words)
