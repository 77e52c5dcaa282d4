"""A log of request times alone: what it tells of a server's steps, and what is refused."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose
from omegaconf import OmegaConf

from experiments.fidelity.calibrate import scored
from pagedsim.core import ConfigError
from pagedsim.fidelity.logs import fit, report
from pagedsim.fidelity.logs.fit import search
from pagedsim.fidelity.logs.log import Latencies, Log, read_log
from pagedsim.fidelity.logs.score import Error, Scores, Spread, Worst, score
from pagedsim.fidelity.logs.server import ExternalServer, Fit, serve
from tests.run.studies import carried_out

SERVER = [
    *("experiment=calibrate", "model=llama-3.1-8b", "hardware=rtx4090"),
    *("batching=unified", "memory=prefix", "memory.blocks=450", "server.max_batched_tokens=1024"),
    "tracking=none",
]
TRUE = {
    "compute_efficiency": 0.75,
    "bandwidth_efficiency": 0.62,
    "cache_efficiency": 0.8,
    "host_step_ms": 4.0,
    "host_request_us": 20.0,
    "front_ms": 30.0,
}
"""Of the server whose log the tests have; the search begins elsewhere."""
REAL = Path(__file__).parents[1] / "data/vllm-0.19-rtx4090-llama-3.1-8b.csv"


pytestmark = pytest.mark.usefixtures("hydra")


def configuration(*words: str) -> Any:
    return compose("config", overrides=[*SERVER, *words])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at anything but how good a fit is."""
    monkeypatch.setattr(fit, "TRIES", 1)
    monkeypatch.setattr(fit, "BEGINNINGS", 1)
    monkeypatch.setattr(fit, "DESCENTS", 1)
    monkeypatch.setattr(fit, "SIZES", (0.3,))
    monkeypatch.setattr(fit, "MOVES", 2)
    monkeypatch.setattr(fit, "STEPS", (0.1,))


def server(log: Log, *words: str) -> ExternalServer:
    config: Any = OmegaConf.to_container(configuration(*words), resolve=True)
    return ExternalServer(config, log)


def asked(count: int, rate: float = 4.0) -> Log:
    """Requests without answers yet."""
    rng = random.Random(0)
    arrived = np.cumsum([0.0, *(rng.expovariate(rate) for _ in range(count - 1))])
    prompt = np.array([rng.randint(20, 1500) for _ in range(count)])
    output = np.array([rng.randint(1, 300) for _ in range(count)])
    never = np.full(count, np.nan)
    places = [str(row) for row in range(count)]
    clients = [""] * count
    return Log(Path("none"), places, arrived, prompt, Latencies(never, never, output), clients)


def answered(path: Path, count: int = 80, rate: float = 4.0) -> Path:
    """The log of a server with the true weights, on a memory that makes it preempt."""
    log = asked(count, rate)
    served = serve(server(log), TRUE)
    assert served.preemptions > 0
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["arrived_at", "num_prefill_tokens", "num_decode_tokens", "ttft", "e2e"])
        times = served.latencies
        for row in range(count):
            lengths = log.prompt[row], log.output[row]
            table.writerow([100 + log.arrived[row], *lengths, times.ttft[row], times.e2e[row]])
    return path


def perform(folder: Path, *words: str) -> dict[str, Any]:
    """The experiment, as the front door runs it; the data that it leaves."""
    data: dict[str, Any] = carried_out(folder, *SERVER, "report=false", *words)["data"]
    return data


@pytest.mark.slow
def test_the_weights_of_a_simulated_server_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = answered(tmp_path / "log.csv")
    found = perform(tmp_path / "out", f"requests={path}")
    unseen = found["scores"]["unseen"]["errors"]
    assert found["scores"]["unseen"]["requests"] == 40
    for metric, error in unseen.items():
        assert abs(error["mean"]) < 0.01, metric
    before = found["scores"]["unseen, before the fit"]["errors"]
    assert abs(before["tpot"]["mean"]) > 0.1
    assert found["distance"] < found["before"]
    ranges = {name: of["range"] for name, of in found["constants"].items() if of["range"]}
    for name, true in TRUE.items():
        assert ranges[name]["low"] <= true <= ranges[name]["high"], name
    # Reading the weights and the host's work are there once a step, whatever its batch.
    assert ranges["compute_efficiency"]["decided"]
    assert not ranges["bandwidth_efficiency"]["decided"]
    assert not ranges["host_step_ms"]["decided"]
    said = capsys.readouterr().out
    assert "the host, a step" in said
    assert "simulate  cost.compute_efficiency=0." in said


@pytest.mark.slow
def test_a_real_vllm_is_predicted(tmp_path: Path) -> None:
    """Of 300 requests to an overloaded server that preempts, half are fitted."""
    real = ("memory.blocks=2588", "server.max_batched_tokens=2048", f"requests={REAL}")
    found = perform(tmp_path / "out", *real)
    errors = found["scores"]["unseen"]["errors"]
    for metric, most in (("ttft", 0.03), ("tpot", 0.02), ("e2e", 0.02)):
        assert abs(errors[metric]["mean"]) < most, metric
    assert errors["ttft"]["half"] < 0.02 and errors["e2e"]["half"] < 0.02
    assert found["distance"] <= found["before"]
    # Saturated from the first second, it tells little of what a step takes beside its kernels.
    assert not found["constants"]["host_step_ms"]["range"]["decided"]
    assert found["cold"]["requests"]


H100 = (
    *("hardware=h100", "server.max_batched_tokens=4096", "server.max_model_len=8192"),
    "memory=prefix",
)


@pytest.mark.slow
def test_what_is_fitted_to_one_model_predicts_another(tmp_path: Path) -> None:
    """Llama-2-7B's unseen half, and CodeLlama-34B, of which no request is fitted."""
    llama = ("model=llama-2-7b", "model.max_model_len=8192", "memory.blocks=7438")
    log = f"requests={REAL.parent / 'vllm-0.11-llama-2-7b.csv'}"
    fitted = perform(tmp_path / "fit", *H100, *llama, log)
    errors = fitted["scores"]["unseen"]["errors"]
    assert abs(errors["tpot"]["mean"]) < 0.05 and abs(errors["e2e"]["mean"]) < 0.05
    assert fitted["cold"]["requests"] == 1
    other = ("model=codellama-34b", "memory.blocks=2537", f"fit={tmp_path / 'fit'}")
    log = f"requests={REAL.parent / 'vllm-0.11-codellama-34b.csv'}"
    found = perform(tmp_path / "out", "experiment=predict", *H100, *other, log)
    errors = found["scores"]["all"]["errors"]
    for metric, most in (("ttft", 0.2), ("tpot", 0.1), ("e2e", 0.1)):
        assert abs(errors[metric]["mean"]) < most, metric
        assert errors[metric]["each"] < most, metric
    assert errors["queue"]["correlation"] > 0.95


@pytest.mark.usefixtures("hasty")
def test_what_it_leaves_predicts(tmp_path: Path) -> None:
    path = answered(tmp_path / "log.csv", count=40)
    found = perform(tmp_path / "out", f"requests={path}")
    fit = Fit.load(tmp_path / "out")
    assert fit == Fit.load(tmp_path / "out/fit.json")
    assert fit.source == "log.csv"
    assert fit.largest["prefill_tokens"] <= 1024
    of = server(read_log(path))
    assert not [line for line in fit.doubts(of, serve(of, fit.of(of))) if "fitted for" in line]
    values = {name: one["value"] for name, one in found["constants"].items()}
    assert fit.constants == pytest.approx(values, rel=1e-4)  # result.json rounds
    predicted = scored(of.config, of.log, fit.of(of))
    assert predicted.scores["all"].count == 40


@pytest.mark.usefixtures("hasty")
def test_a_guessed_memory_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = answered(tmp_path / "log.csv", count=40)
    for blocks, told in (("450", False), ("null", True)):
        perform(tmp_path / blocks, f"requests={path}", f"memory.blocks={blocks}")
        printed = " ".join(capsys.readouterr().out.split())
        assert ("memory.blocks was not given: the server is taken to have" in printed) == told


@pytest.mark.usefixtures("hasty")
def test_times_that_are_not_fitted_change_no_weight(tmp_path: Path) -> None:
    path = answered(tmp_path / "log.csv", count=40)
    first = perform(tmp_path / "a", f"requests={path}")
    rows = path.read_text().splitlines()
    for number in range(21, 41):
        *fields, last = rows[number].split(",")
        rows[number] = ",".join([*fields, str(3 * float(last))])
    path.write_text("\n".join(rows))
    second = perform(tmp_path / "b", f"requests={path}")
    assert first["constants"] == second["constants"]
    assert first["scores"]["unseen"] != second["scores"]["unseen"]


@pytest.mark.usefixtures("hasty")
def test_requests_that_come_at_once_are_split_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = answered(tmp_path / "log.csv", count=40, rate=1e9)
    text = path.read_text().splitlines()
    rows = [text[0], *(",".join(["5", *row.split(",")[1:]]) for row in text[1:])]
    path.write_text("\n".join(rows))
    perform(tmp_path / "out", f"requests={path}")
    assert "all requests come at once" in " ".join(capsys.readouterr().out.split())


def test_a_search_finds_the_bottom_of_a_valley() -> None:
    def valley(point: Any) -> float:
        x, y = point
        return float(abs(x - 1) + 10 * abs(y - x**2))

    found = search(valley, np.array([-1.0, 2.0]), (0.5, 0.1, 0.02), 200)
    assert found == pytest.approx([1, 1], abs=0.02)


# -- logs ------------------------------------------------------------------------------------------

VLLM = {
    "request_id": "a",
    "input_toks": 7,
    "output_toks": 3,
    "arrival_time": 1000.0,
    "queued_ts": 5.25,
    "first_token_ts": 6.0,
    "last_token_ts": 8.0,
}


def test_two_clocks_are_laid_over_each_other(tmp_path: Path) -> None:
    """The second request is queued at once; the first waits for 0.25 s before it is seen."""
    second = VLLM | {"request_id": "b", "arrival_time": 1001.0, "queued_ts": 6.0}
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(second)}\n{json.dumps(VLLM)}\n")
    with pytest.raises(ConfigError, match=r"log.jsonl:1: arrives at 1001, has its first token at"):
        read_log(path)
    second["first_token_ts"] = 7.5
    path.write_text(f"{json.dumps(second)}\n{json.dumps(VLLM)}\n")
    log = read_log(path)
    assert log.places == [f"{path}:2", f"{path}:1"]
    assert log.arrived.tolist() == [0, 1]
    assert log.latencies.ttft.tolist() == [1.0, 1.5]
    assert log.latencies.e2e.tolist() == [3.0, 2.0]
    assert log.latencies.tpot.tolist() == [1.0, 0.25]


def test_parquet_and_csv_are_read_alike(tmp_path: Path) -> None:
    columns = {
        "arrived_at": [1.0, 2.5],
        "num_prefill_tokens": [4, 5],
        "num_decode_tokens": [1, 9],
        "ttft": [0.5, 0.25],
        "finished_at": [1.5, 4.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    with (tmp_path / "log.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    for name in ("log.parquet", "log.csv"):
        log = read_log(tmp_path / name)
        assert log.arrived.tolist() == [0, 1.5]
        assert log.prompt.tolist() == [4, 5]
        assert log.latencies.ttft.tolist() == [0.5, 0.25]
        assert log.latencies.e2e.tolist() == [0.5, 1.5]
        assert np.isnan(log.latencies.tpot[0])


HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens,ttft,e2e"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", "", "requests={}: holds no requests"),
        ("a.csv", HEADER, "requests={}: holds no requests"),
        ("a.csv", f"{HEADER}\n0,5,3,1", "{}:2: e2e=None: must be a number"),
        ("a.csv", f"{HEADER}\n0,5,3,1,2\n1,5,3,,2", "{}:3: ttft='': must be a number"),
        ("a.csv", f"{HEADER}\n0,5,0,1,2", "{}:2: num_decode_tokens=0: must be a whole number"),
        ("a.csv", f"{HEADER}\n0,5.5,1,1,2", "{}:2: num_prefill_tokens=5.5: must be a whole"),
        ("a.csv", f"{HEADER}\n0,5,3,2,1", "{}:2: arrives at 0, has its first token at 2 and"),
        ("a.csv", "arrived_at,ttft\n0,1", "{}:2: has no finished_at or e2e, only arrived_at"),
        ("a.jsonl", '{"arrived_at": 1\n', "{}:1: is not JSON: "),
        ("a.jsonl", '{"arrived_at": 1}\n[]\n', "{}:2: must be an object, one a line"),
        ("a.jsonl", '[{"arrived_at": 1}]', "{}: is a JSON list: must be JSON lines"),
        ("a.jsonl", '\n {"arrived_at": 1}', "{}:2: has no first_token_at or ttft"),
        ("a.csv", f"{HEADER}\n0,5,3,1,2,9", "{}:2: has more fields than the header"),
        ("a.parquet", "PAR0", "{}: cannot be read: "),
        ("a.PARQUET", "PAR0", "{}: cannot be read: "),
    ],
)
def test_logs_that_cannot_be_read(name: str, text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_log(path)
    assert str(error.value).startswith(line.format(path))
    assert "\n" not in str(error.value)


def test_a_log_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"requests=nowhere\.csv: no such file"):
        read_log("nowhere.csv")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "run: must be given: run=<folder of an earlier study on the engine>, requests=<log"),
        (
            ["requests={}"],
            "{}: study.split=0.5 fits to 15 of its 30 requests: must be at least 20, and",
        ),
        (["requests={}", "study.split=1"], "study.split=1: must be a number above 0, below 1"),
        (["requests={}", "study.split=-1"], "study.split=-1: must be a number above 0, below 1"),
        (["requests={}", "study.split=0.8", "backend=engine"], "backend=engine: must be sim: "),
        (
            ["requests={}", "study.split=0.8", "server.max_model_len=1000"],
            "{}:2 is refused by the simulated server: ",
        ),
    ],
)
def test_what_cannot_be_fitted(words: list[str], line: str, tmp_path: Path) -> None:
    path = answered(tmp_path / "log.csv", count=30)
    with pytest.raises(ConfigError) as error:
        perform(tmp_path / "out", *(word.format(path) for word in words))
    assert str(error.value).startswith(line.format(path))


@pytest.mark.filterwarnings("error")
def test_one_request_has_no_correlation() -> None:
    log = asked(1)
    times = Latencies(np.array([1.0]), np.array([2.0]), log.output)
    log = replace(log, latencies=times)
    assert np.isnan(score(log, times, np.arange(1)).errors["e2e"].correlation)


def test_scores_say_where_they_are_worst() -> None:
    log = asked(40)
    measured = Latencies(np.full(40, 1.0), np.full(40, 2.0), log.output)
    predicted = Latencies(
        np.where(log.arrived < log.arrived[10], 1.5, 1.0), measured.e2e, log.output
    )
    log = replace(log, latencies=measured)
    found = score(log, predicted, np.arange(40))
    assert found.errors["ttft"].off.mean == pytest.approx(0.125)
    assert found.errors["ttft"].off.p50 == 0
    assert found.errors["ttft"].off.p99 == pytest.approx(0.5)
    assert found.worst.metric in ("ttft", "tpot")
    assert found.worst.by == "arrival"
    assert found.worst.high == log.arrived[9]


def test_short_times_are_told_with_two_digits() -> None:
    none = Spread(0.0, 0.0, 0.0, 0.0)
    ttft, e2e = (
        Error(Spread(one, one, one, one), Spread(two, two, two, two), none, 0.0, 0.0, 0.0, 1.0)
        for one, two in ((0.01384, 0.0142), (2.7012, 12.31))
    )
    scores = Scores(2, {"ttft": ttft, "e2e": e2e}, Worst("ttft", "prompt tokens", 1, 2, 0.0))
    rows = report.errors("unseen", scores).rows
    assert [row[:3] for row in rows] == [["TTFT, s", "0.014", "0.014"], ["E2E, s", "2.70", "12.31"]]
