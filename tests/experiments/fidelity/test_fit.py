"""Constants fitted to a log of request times, predictions of other logs, and consistency checks."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.experiments.benchmarks.serving import listening
from pagedsim.experiments.fidelity.truth_data import LOGS
from pagedsim.fidelity.logs import fit
from pagedsim.fidelity.logs.consistency_checks import inconsistencies
from pagedsim.fidelity.logs.constants import Constant
from pagedsim.fidelity.logs.fit import Cold, search
from pagedsim.fidelity.logs.log import Latencies, Log, read_log
from pagedsim.fidelity.logs.outlook import outlooks
from pagedsim.fidelity.logs.ranges import correlations, pairs
from pagedsim.fidelity.logs.report import about_log
from pagedsim.fidelity.logs.score import score
from pagedsim.fidelity.logs.server import ExternalServer, Fit, Served
from pagedsim.fidelity.logs.trials import Part, Prior, Trials
from pagedsim.metrics.files import read_summary
from tests.run.studies import carried_out, settings_of

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
LIKELY = {
    "compute_efficiency": 0.93,
    "bandwidth_efficiency": 0.88,
    "cache_efficiency": 0.92,
    "host_step_ms": 1.4,
    "host_request_us": 25.0,
    "front_ms": 30.0,
}
"""Nearer to what is known of such servers."""
REAL = LOGS / "vllm-0.19-rtx4090-llama-3.1-8b.csv"


HASTY = {
    **{"DESCENTS": 1, "PARTS": (1.0,), "SIZES": (0.3,), "MOVES": 2},
}
"""Of a search, for tests that look at anything but how good a fit is."""
FREE = 2
"""Constants that such a search may move."""


@contextmanager
def hasty() -> Iterator[None]:
    """A short search in the body."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in HASTY.items():
            patch.setattr(fit, name, value)
        units = Trials._units
        few = lambda trials: dict(list(units(trials).items())[:FREE])  # noqa: E731
        patch.setattr(Trials, "_units", few)
        yield


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 40 requests."""
    return answered(tmp_path_factory.mktemp("log") / "log.csv", 40, rate=12.0, longest=60)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Path:
    """The folder of a hasty calibration to it."""
    folder = tmp_path_factory.mktemp("left")
    with hasty():
        perform(folder, f"requests={log}")
    return folder


def server(log: Log, *words: str) -> ExternalServer:
    return ExternalServer(settings_of(*SERVER, *words), log)


def serve(of: ExternalServer, constants: dict[str, float]) -> Served:
    return of.serve_with(constants)


def asked(count: int, rate: float = 4.0, longest: int = 300) -> Log:
    """Requests without answers yet, of which none is of more than `longest` tokens."""
    rng = random.Random(0)
    arrived = np.cumsum([0.0, *(rng.expovariate(rate) for _ in range(count - 1))])
    prompt = np.array([rng.randint(20, 1500) for _ in range(count)])
    output = np.array([rng.randint(1, longest) for _ in range(count)])
    never = np.full(count, np.nan)
    places = [str(row) for row in range(count)]
    clients = [""] * count
    return Log(Path("none"), places, arrived, prompt, Latencies(never, never, output), clients)


def answered(
    path: Path,
    count: int = 80,
    rate: float = 4.0,
    longest: int = 300,
    true: dict[str, float] = TRUE,
) -> Path:
    """The log of a server with the true constants, on a memory that makes it preempt."""
    log = asked(count, rate, longest)
    served = serve(server(log), true)
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
@pytest.mark.parametrize("true", [LIKELY, TRUE], ids=["likely", "strange"])
def test_the_constants_of_a_simulated_server_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], true: dict[str, float]
) -> None:
    """Those of a server that is as tables say; one that is not has its latencies predicted."""
    path = answered(tmp_path / "log.csv", true=true)
    found = perform(tmp_path / "out", f"requests={path}")
    unseen = found["scores"]["unseen"]["errors"]
    assert found["scores"]["unseen"]["requests"] == 40
    for metric, error in unseen.items():
        assert abs(error["mean"]) < 0.01, metric
    assert found["distance"] < found["before"]
    if true is TRUE:
        before = found["scores"]["unseen, before the fit"]["errors"]
        assert abs(before["tpot"]["mean"]) > 0.1
        return
    ranges = {name: of["range"] for name, of in found["constants"].items() if of["range"]}
    for name, value in true.items():
        assert ranges[name]["low"] <= value <= ranges[name]["high"], name
    assert ranges["compute_efficiency"]["decided"] and ranges["bandwidth_efficiency"]["decided"]
    assert not ranges["host_step_ms"]["decided"]
    said = capsys.readouterr().out
    assert "the host, a step" in said
    assert "simulate  cost.compute_efficiency=0.9" in said


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
def test_a_fit_to_one_model_predicts_another(tmp_path: Path) -> None:
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


def test_a_calibration_is_saved_and_predicts(log: Path, left: Path) -> None:
    found = json.loads((left / "result.json").read_text())
    kept = Fit.load(left)
    assert kept == Fit.load(left / "fit.json")
    assert kept.source == "log.csv" and kept.largest["prefill_tokens"] <= 1024
    of = server(read_log(log))
    assert not [line for line in kept.doubts(of, serve(of, kept.of(of))) if "fitted for" in line]
    values = {name: one["value"] for name, one in found["data"]["constants"].items()}
    assert kept.constants == pytest.approx(values, rel=1e-4)  # result.json rounds
    assert "interconnect_efficiency" not in kept.constants  # of which one GPU says nothing
    assert serve(of, kept.of(of)).score().count == 40
    assert not [note for note in found["notes"] if "memory.blocks was not given" in note]


def test_unseen_times_change_no_constant(tmp_path: Path, log: Path, left: Path) -> None:
    rows = log.read_text().splitlines()
    for number in range(21, 41):
        *fields, last = rows[number].split(",")
        rows[number] = ",".join([*fields, str(3 * float(last))])
    path = tmp_path / "log.csv"
    path.write_text("\n".join(rows))
    with hasty():
        part = Part(server(read_log(path)), np.arange(20))
        found = fit.fit_to_logs([part], ranges=False)
    assert found.constants == Fit.load(left).constants


def test_what_tables_decide_hardly_moves_and_the_host_does() -> None:
    kernel, host = Constant("bandwidth_efficiency"), Constant("host_request_us")
    assert kernel.width("hopper") < kernel.width(None) < host.width("hopper")
    begin, units = np.array([1.0, 50.0]), np.array([0.1, 5.0])
    widths = np.array([kernel.width("hopper"), host.width("hopper")])
    prior = Prior(begin, units, widths, np.array([0.0, 20.0]), logs=1)
    assert prior.factor(np.zeros(2)) == 1
    slower, busier = (prior.factor(np.eye(2)[index]) for index in range(2))  # a tenth of each
    assert slower > 1.2 and 1 < busier < 1.01
    twice = Prior(begin, units, widths, np.zeros(2), logs=2).factor(np.eye(2)[0])
    assert twice == pytest.approx(slower**0.5)  # two logs know twice as much
    point, little = np.array([0.3, -2.0]), 1e-5
    for index, step in enumerate(little * np.eye(2)):
        up, down = (np.log(prior.factor(point + side * step)) for side in (1, -1))
        assert prior.at(point).first[index] == pytest.approx((up - down) / (2 * little), rel=1e-4)


def test_a_search_finds_the_bottom_of_a_valley() -> None:
    def valley(point: Any) -> float:
        x, y = point
        return float(abs(x - 1) + 10 * abs(y - x**2))

    found = search(valley, np.array([-1.0, 2.0]), (0.5, 0.1, 0.02), 200)
    assert found == pytest.approx([1, 1], abs=0.02)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["requests={}", "study.split=0.3"],
            "{}: study.split=0.3 fits to 12 of its 40 requests: must be at least 20, and",
        ),
        (["requests={}", "backend=engine"], "backend=engine: must be sim: "),
        (
            ["requests={}", "server.max_model_len=1000"],
            "{}:2 is refused by the simulated server: ",
        ),
    ],
)
def test_invalid_settings_are_refused(
    words: list[str], line: str, tmp_path: Path, log: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        perform(tmp_path / "out", *(word.format(log) for word in words))
    assert str(error.value).startswith(line.format(log))


# -- several logs --------------------------------------------------------------------------------


def test_logs_are_fitted_together_and_each_is_left_out(tmp_path: Path, log: Path) -> None:
    """Of a GPU and of another: what their kernels reach is each one's own."""
    other = answered(tmp_path / "other.csv", 40, rate=8.0, longest=60)
    of_another = '"hardware=rtx-pro-6000", "memory.blocks=9000"'
    logs = (
        f"study.logs={{first: {{requests: {log}, server: []}}, "
        f"second: {{requests: {other}, server: [{of_another}]}}}}"
    )
    with hasty():
        together = perform(tmp_path / "two", logs, "jobs=1")
    assert set(together["scores"]) == {
        f"{name}, {how}" for name in ("first", "second") for how in ("fitted", "left out")
    }
    assert together["server"]["hardware"] == "rtx4090 and rtx-pro-6000"
    assert "bandwidth_efficiency" not in together["constants"]
    kept = Fit.load(tmp_path / "two")
    of = server(read_log(log), "hardware=rtx-pro-6000")
    assert kept.of(of)["bandwidth_efficiency"] == of.constants["bandwidth_efficiency"]
    assert not [line for line in kept.doubts(of, serve(of, TRUE)) if "fitted for" in line]


def test_correlated_constants_are_named() -> None:
    """Two that only their sum matters for, and a third."""
    slopes = np.array([[1.0, 1.0, 0.0], [2.0, 2.1, 0.0], [0.0, 0.0, 1.0]])
    together = correlations(np.linalg.inv(slopes.T @ slopes))
    ((one, other, correlation),) = pairs(["a", "b", "c"], together)
    assert (one, other) == ("a", "b") and -1 <= correlation < -0.99


def test_other_models_move_as_far_as_the_constants_that_fit_as_well() -> None:
    """A decode step reads weights: a tenth slower reading is at most a tenth of it."""
    of = server(asked(4))
    slower = {**TRUE, "bandwidth_efficiency": TRUE["bandwidth_efficiency"] / 1.1}
    left_open = {(o.model, o.step): o for o in outlooks(of, TRUE, [slower])}
    small, large = (left_open[name, "1 token"] for name in ("llama-3.2-3b", "llama-3.1-70b"))
    assert small.least == small.fitted < small.most < 1.1 * small.fitted
    assert small.most / small.fitted < large.most / large.fitted < 1.1
    bytes_read = large.fitted * of.built.replica.hardware.bandwidth * 0.62
    assert bytes_read == pytest.approx(2 * 70.6e9, rel=0.03)
    assert left_open["llama-3.1-70b", "prompt"].most == left_open["llama-3.1-70b", "prompt"].fitted


def test_too_short_a_log_is_refused(tmp_path: Path, log: Path) -> None:
    short = tmp_path / "short.csv"
    short.write_text("\n".join(log.read_text().splitlines()[:11]))
    with pytest.raises(ConfigError, match=rf"^short: {short} has 10 requests: must have 20"):
        perform(tmp_path / "out", f"requests=[{log},{short}]")


# -- predictions ---------------------------------------------------------------------------------


def fit_of(path: Path, **changes: Any) -> Path:
    """What a calibration would leave that found everything."""
    of = server(asked(20))
    facts = {**of.facts, **changes}
    Fit(TRUE, facts, {"decode_count": 256}, "first.csv", ["host_request_us"]).save(path)
    return path


def test_another_log_is_predicted(tmp_path: Path, log: Path) -> None:
    known = f"fit={fit_of(tmp_path / 'fit.json')}"
    found = perform(tmp_path / "out", "experiment=predict", known, f"requests={log}")
    errors = found["scores"]["all"]["errors"]
    assert set(errors) == {"ttft", "tpot", "e2e"}
    assert all(abs(error["mean"]) < 1e-3 and error["each"] < 1e-3 for error in errors.values())
    lines = found["over_time"]
    assert lines["measured"]["running"] == lines["simulated"]["running"]
    assert max(lines["simulated"]["kv"]) > 50
    result = json.loads((tmp_path / "out/result.json").read_text())
    said = " ".join([*result["finding"], *result["notes"]])
    assert "predicted with what was fitted to first.csv" in said
    assert "the fitted log did not decide host_request_us" in said
    assert "fitted for" not in said
    assert "memory.blocks was not given" not in said and "come at once" not in said


@pytest.mark.parametrize("cost", ["roofline", "distserve-opt-13b-tp1"])
def test_a_log_is_predicted_by_any_cost_model_as_it_is(
    tmp_path: Path, log: Path, cost: str
) -> None:
    words = ("experiment=predict", "fit=none", f"requests={log}", f"cost={cost}")
    unfitted = perform(tmp_path / "out", *words, "memory.blocks=9000")
    errors = unfitted["scores"]["all"]["errors"]
    assert abs(errors["tpot"]["mean"]) > 0.02  # the log's server has other constants
    assert unfitted["fit"] is None and unfitted["constants"] == {}
    served = server(read_log(log), f"cost={cost}", "memory.blocks=9000").serve().score()
    assert errors["e2e"]["mean"] == pytest.approx(served.errors["e2e"].relative.mean, rel=1e-3)


def test_guessed_memory_and_simultaneous_arrivals_are_noted(log: Path) -> None:
    of = server(replace(read_log(log), arrived=np.zeros(40)), "memory.blocks=null")
    served = serve(of, TRUE)
    notes = list(about_log(of, served, Cold(0), served.score(), "requests"))
    assert notes[0].startswith("memory.blocks was not given: the server is taken to have ")
    assert notes[-1].startswith("all requests come at once")


def test_differences_from_the_fitted_server_are_noted(tmp_path: Path) -> None:
    of, path = server(asked(4)), tmp_path / "fit.json"
    others = {"hardware": "a100-80gb", "tensor_parallel": 2, "model": "mistral-7b"}
    told = "\n".join(Fit.load(fit_of(path, **others)).doubts(of, serve(of, TRUE)))
    assert "fitted for hardware=a100-80gb, but hardware=rtx4090 is" in told
    assert "fitted for tensor_parallel=2, but tensor_parallel=1 is" in told
    assert "fitted for model=mistral-7b, and llama-3.1-8b is predicted: the" in told
    kept = Fit.load(fit_of(path, hardware="h100", family="hopper"))
    assert kept.of(of)["compute_efficiency"] == of.constants["compute_efficiency"]
    assert kept.of(of)["host_step_ms"] == TRUE["host_step_ms"]
    assert "fitted for hardware=h100, and rtx4090 is predicted: what its" in next(
        iter(kept.doubts(of, serve(of, TRUE)))
    )
    strange = replace(Fit.load(path), constants={"wit": 1.0})
    with pytest.raises(ConfigError, match=r"^fit: has wit: cost= has only compute_efficiency"):
        strange.of(of)
    with pytest.raises(ConfigError, match="must be cost=roofline"):
        _ = server(asked(4), "cost=distserve-opt-13b-tp1").constants


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "fit={}: is not JSON"),
        ("[]", "fit={}: must hold an object with constants, server, largest, source, undecided"),
        ({"constants": {}}, "fit={}: constants must be an object that has front_ms"),
        (
            {"constants": {"front_ms": -1}},
            "fit={}: constants.front_ms=-1: must be a number of",
        ),
        (
            {"constants": {"front_ms": 1, "bandwidth_efficiency": 1.2}},
            "fit={}: constants.bandwidth_efficiency=1.2: must be",
        ),
    ],
)
def test_unreadable_fits_are_refused(tmp_path: Path, text: Any, line: str) -> None:
    path = fit_of(tmp_path / "fit.json")
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        Fit.load(path)
    assert str(error.value).startswith(line.format(path))


# -- the log ---------------------------------------------------------------------------------------


def test_settings_that_the_log_fits_better_are_named() -> None:
    """A log of 8 sequences at most and chunked prompts, taken for one of 256 and whole prompts."""
    log = asked(80, rate=30.0)
    limits = "memory.blocks=9000", "server.max_batched_tokens=8192", "server.max_model_len=4096"
    times = serve(server(log, *limits, "server.max_seqs=8"), TRUE).latencies
    of = server(replace(log, latencies=times), *limits, "batching=prefill_first")
    lines = inconsistencies(of, serve(of, TRUE), TRUE)
    (line,) = [line for line in lines if "these settings" in line]
    assert "server.max_seqs=8 it would be" in line
    right = server(replace(log, latencies=times), *limits, "server.max_seqs=8")
    lines = inconsistencies(right, serve(right, TRUE), TRUE)
    assert not any("these settings" in line for line in lines)


def test_more_running_requests_than_max_seqs_are_noted() -> None:
    log = asked(30, rate=1e6)
    limits = "server.max_seqs=8", "memory.blocks=9000"
    long = Latencies(np.full(30, 100.0), np.full(30, 200.0), log.output)
    of = server(replace(log, latencies=long), *limits)
    line = "up to 30 requests had begun and not ended at a time, and server.max_seqs=8"
    assert any(one.startswith(line) for one in inconsistencies(of, serve(of, TRUE), TRUE))
    # Those whose last token is seen a step after their seat was given away overlap.
    times = serve(server(log, *limits), TRUE).latencies
    late = replace(times, e2e=times.e2e + 0.9 * np.nan_to_num(times.tpot))
    of = server(replace(log, latencies=late), *limits)
    assert not any("server.max_seqs" in line for line in inconsistencies(of, serve(of, TRUE), TRUE))


@pytest.mark.parametrize(("span", "cached"), [(1.0, True), (9.0, False)])
def test_more_flop_than_the_peak_has_are_put_down_to_a_cache(span: float, cached: bool) -> None:
    """40 prompts of 1,000 tokens want 3.9 s of 165 TFLOP/s, whenever their answers end."""
    log, limits = asked(40), ("memory.blocks=9000", "server.max_seqs=64")
    arrived, first = np.linspace(0.0, 0.1, 40), np.linspace(0.5, span, 40)
    times = Latencies(first - arrived, np.full(40, 100.0), np.full(40, 50))
    of = server(replace(log, arrived=arrived, prompt=np.full(40, 1000), latencies=times), *limits)
    lines = [line for line in inconsistencies(of, serve(of, TRUE), TRUE) if "FLOP" in line]
    assert len(lines) == cached
    if cached:
        assert lines[0].startswith("40 prompts came and had their first tokens within 1 s, and ")
        assert "memory=prefix" in lines[0]


def test_the_queue_is_read_and_scored(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    head = "arrived_at,num_prefill_tokens,num_decode_tokens,ttft,e2e,queue"
    path.write_text(f"{head}\n0,5,3,1,2,0.5\n1,5,3,1,2,0\n")
    log = read_log(path)
    assert log.latencies.queue is not None and log.latencies.queue.tolist() == [0.5, 0.0]
    twice = replace(log.latencies, queue=2 * log.latencies.queue)
    queue = score(log, twice, np.arange(2)).errors["queue"]
    assert (queue.relative.mean, queue.mean_absolute) == (1.0, 1.0)  # of the one that waited
    assert "queue" not in score(log, replace(log.latencies, queue=None), np.arange(2)).errors
    path.write_text(f"{head}\n0,5,3,1,2,0.5\n1,5,3,1,2,-1\n")
    with pytest.raises(ConfigError, match=r"log.csv:3: queue=-1: the request is -1 s in the queue"):
        read_log(path)


# -- observe, calibrate, simulate ------------------------------------------------------------------

OBSERVED = ("model=llama-2-7b", "hardware=a10", "memory.blocks=1000", "server.max_seqs=24")
"""Settings of the server that the simulator receives; its speed is to be fitted."""
SLOWER = ("cost.compute_efficiency=0.4", "cost.host_step_ms=6")
LOAD = (
    *("workload.requests=100", "workload.rate=8", "workload.max_len=700", "seeds=1"),
    *("workload.lengths.shape=uniform", "+workload.lengths.prompt_min=100"),
    *("+workload.lengths.prompt_max=500", "+workload.lengths.output_min=10"),
    "+workload.lengths.output_max=60",
)
MEANS = ("ttft_mean", "tpot_mean", "e2e_mean", "requests_per_s", "output_tokens_per_s")


def means(folder: Path) -> dict[str, Any]:
    (run,) = (folder / "runs").glob("*/seed-0")
    summary = read_summary(run)
    return {name: summary[name] for name in MEANS}


@pytest.mark.slow
def test_a_server_that_was_observed_is_simulated_within_a_tenth(tmp_path: Path) -> None:
    """By the wall clock: where others use the machine at that moment it is observed again."""
    pytest.importorskip("aiohttp")
    pytest.importorskip("uvicorn")
    found = [around(tmp_path / "first")]
    while found[-1][1] != pytest.approx(found[-1][0], rel=0.1) and len(found) < 3:
        found.append(around(tmp_path / f"again-{len(found)}"))
    observed, simulated = found[-1]
    assert simulated == pytest.approx(observed, rel=0.1), found


def around(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is observed of a server, and what is simulated of it with what was fitted to that."""
    folder.mkdir()
    log, quick = folder / "log.csv", ("report=false", "tracking=none")
    with listening(*OBSERVED, *SLOWER) as child:
        asked = (f"backend.url={child.url}", *LOAD, f"record={log}", *quick)
        carried_out(folder / "observed", "experiment=bench", *asked)
    fit = ("experiment=calibrate", f"requests={log}", *OBSERVED, *quick)
    found = carried_out(folder / "fitted", *fit)["data"]["words"].split()
    carried_out(folder / "simulated", "experiment=single", *OBSERVED, *LOAD, *found, *quick)
    return means(folder / "observed"), means(folder / "simulated")
