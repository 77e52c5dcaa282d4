"""Fitted step times: shipped coefficients by hand, fits that find what made the data."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError, StepPlan
from pagedsim.server import ServerSpec
from pagedsim.sim.cost import Fitted, Roofline, Sample
from pagedsim.sim.cost.fitting import FEATURES, KINDS, Matrix, fit, fit_kinds, nnls
from pagedsim.sim.replica import Replica
from tests.core.refusals import refusal
from tests.sim.shapes import plan, replica, shipped

DISTSERVE = {
    "distserve-opt-13b-tp1": ("opt-13b", 1),
    "distserve-opt-13b-tp2": ("opt-13b", 2),
    "distserve-opt-66b-tp4": ("opt-66b", 4),
    "distserve-own-opt-13b-tp1": ("opt-13b", 1),
    "distserve-own-opt-13b-tp2": ("opt-13b", 2),
    "distserve-own-opt-13b-tp4": ("opt-13b", 4),
}


@cache
def distserve(name: str) -> Fitted:
    model_name, gpus = DISTSERVE[name]
    cost = shipped("cost", name)(
        replica=replica(model_name, "a100-80gb", tensor_parallel=gpus),
    )
    assert isinstance(cost, Fitted)
    return cost


def test_blis_coefficients_give_the_times_of_its_formula() -> None:
    cost = shipped("cost", "blis-llama-3.1-8b-tp2")(
        replica=replica("llama-3.1-8b", "h100", tensor_parallel=2)
    )
    assert 1e6 * cost.step_seconds(plan(512)) == pytest.approx(6910.42 + 17.67 * 512)
    mixed = cost.step_seconds(plan(512, decodes=100, context=50_000))
    assert 1e6 * mixed == pytest.approx(6910.42 + 17.67 * 512 + 2.84 * 100)


@pytest.mark.parametrize(
    "step", [plan(1000, 500), plan(decodes=10, context=500), plan(1, decodes=200, context=9000)]
)
def test_on_a_machine_half_as_fast_every_step_takes_twice_as_long(step: StepPlan) -> None:
    cost = distserve("distserve-opt-13b-tp1")
    assert cost.slowed(2).step_seconds(step) == pytest.approx(2 * cost.step_seconds(step))
    assert cost.slowed(2).slowed(0.5).settings == cost.settings
    assert cost.slowed(2).swap_seconds(100) == cost.swap_seconds(100)  # of the data sheet


@pytest.mark.parametrize(
    ("settings", "fitted", "served"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel=1", "tensor_parallel=2"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=auto", "kv_cache_dtype=fp8_e4m3"),
        ({"quantization": "int8"}, "quantization=null", "quantization=int8"),
    ],
)
def test_serving_what_was_not_fitted_is_noticed(
    settings: dict[str, Any], fitted: str, served: str
) -> None:
    """Also where a fit does not name the format of weights, as of before there was another."""
    whole = replica("opt-13b", "a100-80gb")
    where = Replica.of(ServerSpec(**settings), whole.model, whole.hardware)
    assert shipped("cost", "distserve-opt-13b-tp1")(replica=where).notices == [
        f"step times are fitted for {fitted}, but {served} is served"
    ]
    key, value = served.split("=")
    same = {key: int(value) if value.isdigit() else value}
    assert Fitted(where, prefill={}, decode={}, fitted_for=same).notices == []


TRUE = {
    "prefill": (5e-3, 1e-4, 2e-9, 0.0),
    "decode": (8e-3, 4e-5, 3e-7),
    "mixed": (9e-3, 1e-4, 2e-9, 0.0, 4e-5, 3e-7),
}


def recording(noise: float = 0.0, count: int = 60) -> list[Sample]:
    """Steps of all kinds whose times follow TRUE, give or take."""
    random, samples = Random(1), []
    for i in range(count):
        kind = ("prefill", "decode", "mixed")[i % 3]
        tokens = random.randint(16, 2048) if kind != "decode" else 0
        context = tokens + random.choice((0, 512)) if tokens else 0
        decodes = random.randint(1, 128) if kind != "prefill" else 0
        decode_context = decodes * random.randint(10, 2000)
        row = Sample(1.0, tokens, tokens * context, context, decodes, decode_context)
        features = [1.0 if n == "constant" else getattr(row, n) for n in KINDS[kind]]
        seconds = sum(a * b for a, b in zip(TRUE[kind], features, strict=True))
        samples.append(row._replace(seconds=seconds * (1 + random.uniform(-noise, noise))))
    return samples


def test_a_fit_finds_the_coefficients_that_made_the_data() -> None:
    cost = Fitted.fit(recording(), replica("llama-3.1-8b", "h100"))
    assert cost.decode_seconds(64, 64_000) == pytest.approx(8e-3 + 64 * 4e-5 + 64_000 * 3e-7)
    assert cost.recompute_seconds(1000) == pytest.approx(5e-3 + 0.1 + 2e-3)
    mixed = cost.step_seconds(plan(1000, decodes=64, context=64_000))
    assert mixed == pytest.approx(9e-3 + 0.1 + 2e-3 + 64 * 4e-5 + 64_000 * 3e-7)
    fits = fit_kinds(recording())
    assert {kind: (of.samples, of.percent) for kind, of in fits.items()} == dict.fromkeys(
        ("prefill", "decode", "mixed"), (20, "0.0 %")
    )


def test_the_reported_error_is_about_the_noise() -> None:
    found = fit([row for row in recording(0.1, 600) if row.kind == "decode"], KINDS["decode"])
    assert found.error == pytest.approx(0.05, rel=0.2)  # the mean of |uniform(-0.1, 0.1)|


def error_of_refits(a: Matrix, b: Matrix) -> float:
    errors = []
    for i in range(len(a)):
        others = np.arange(len(a)) != i
        errors.append(abs(b[i] - a[i] @ nnls(a[others], b[others])))
    return float(np.mean(errors))


def test_a_step_that_alone_decides_a_coefficient_is_predicted_without_it() -> None:
    """Nine small batches and one large: no other row determines the time of the large one."""
    small = [Sample(1.0, decode_count=1, decode_context=100 + i) for i in range(9)]
    large = Sample(10.0, decode_count=256, decode_context=100)
    found = fit([*small, large], KINDS["decode"])
    assert found.coefficients["decode_count"] == pytest.approx(9 / 255)
    assert found.error > 0.05  # predicted from the small ones it is off by most of its time
    rows = [[1.0, row.decode_count, row.decode_context] for row in (*small, large)]
    seconds = np.array([row.seconds for row in (*small, large)])
    refits = error_of_refits(np.array(rows) / seconds[:, None], np.ones(10))
    assert found.error == pytest.approx(refits)


@pytest.mark.parametrize("name", ["prefill_tokens", "decode_context"])
def test_a_step_beyond_what_was_fitted_is_noticed(name: str) -> None:
    step = plan((50, 100), decodes=5, context=500)
    largest = Sample.of(step, 1.0)._asdict()
    limits = {key: largest[key] for key in FEATURES[1:]}

    def notices(limits: dict[str, float]) -> list[str]:
        where, one = replica("llama-3.1-8b", "h100"), {"constant": 1.0}
        cost = Fitted(where, prefill=one, decode=one, limits=limits)
        cost.step_seconds(step)
        return cost.notices

    assert notices(limits) == []
    (notice,) = notices(limits | {name: limits[name] - 1})
    assert notice.startswith("some steps are larger than any that was fitted (prefill_tokens ")
    assert f"{name} {limits[name] - 1:,.0f}" in notice


def test_only_mixed_steps_serve_for_all_kinds() -> None:
    rows = [row for row in recording() if row.kind == "mixed"]
    cost = Fitted.fit(rows, replica("llama-3.1-8b", "h100"))
    assert cost.decode_seconds(64, 64_000) == pytest.approx(9e-3 + 64 * 4e-5 + 64_000 * 3e-7)


def test_saved_and_loaded_it_answers_the_same(tmp_path: Path) -> None:
    where = replica("llama-3.1-8b", "h100")
    cost = Fitted.fit(recording(0.1), where, bus_efficiency=0.4)
    cost.save(tmp_path / "fit.json")
    again = Fitted.load(tmp_path / "fit.json", where)
    step = plan(100, decodes=5, context=500)
    assert again.step_seconds(step) == cost.step_seconds(step)
    assert again.decode_seconds(7, 900) == cost.decode_seconds(7, 900)
    assert again.swap_seconds(3) == cost.swap_seconds(3) > Roofline(where).swap_seconds(3)
    assert again.settings == cost.settings
    assert json.loads((tmp_path / "fit.json").read_text())["fitted_for"]["hardware"] == "h100"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "0 samples: need at least 4"),
        ([Sample(0.0, 1, 1, 1)] * 9, r"a step of 0.0 s: samples must take longer than 0 s"),
        ([row for row in recording() if row.kind == "decode"], "at least 5 prefill or mixed steps"),
    ],
)
def test_too_little_to_fit_is_refused(rows: list[Sample], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fitted.fit(rows, replica("tiny", "a10"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not JSON"),
        ('{"prefill": {}}', "has no decode coefficients"),
        ('{"prefil": {}}', "unknown key | 'prefil' | did you mean 'prefill'"),
        ('{"prefill": {"tokens": 1}, "decode": {}}', "unknown coefficient | cost.prefill | 'tok"),
        ('{"prefill": {"constant": -1}, "decode": {}}', "cost.prefill.constant=-1 | a number"),
        ('{"prefill": {}, "decode": {}, "mixed": 5}', "cost.mixed=5 | a mapping"),
        ('{"prefill": {}, "decode": {}, "large_batch": 9}', "give both or neither"),
        ('{"prefill": {}, "decode": {}, "limits": {"x": 9}}', "unknown feature | cost.limits"),
        ('{"prefill": {}, "decode": {}, "fitted_for": {"gpu": 1}}', "unknown key | cost.fitted_f"),
    ],
)
def test_a_bad_file_is_refused_with_its_path(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    refusal(lambda: Fitted.load(path, replica("tiny", "a10")), f"{path} | {named}")


# -- non-negative least squares --------------------------------------------------------------------


def brute_force(a: Matrix, b: Matrix) -> float:
    """The smallest |a·x − b| of all x ≥ 0."""
    best = float(np.linalg.norm(b))
    columns = range(a.shape[1])
    for size in range(1, a.shape[1] + 1):
        for chosen in combinations(columns, size):
            part = a[:, list(chosen)]
            x = np.linalg.lstsq(part, b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(part @ x - b)))
    return best


@pytest.mark.parametrize("seed", range(10))
def test_nnls_finds_the_best_of_all_sets(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, columns = int(random.integers(1, 12)), int(random.integers(1, 7))
    a = random.normal(size=(rows, columns)) * 10.0 ** random.integers(-6, 7, size=columns)
    b = random.normal(size=rows)
    x = nnls(a, b)
    assert (x >= 0).all()
    assert np.linalg.norm(a @ x - b) <= brute_force(a, b) * (1 + 1e-9) + 1e-9


# -- small blocks ----------------------------------------------------------------------------------


def test_a_fit_holds_for_the_blocks_that_were_fitted() -> None:
    def cost(size: int) -> float:
        made = shipped("cost", "distserve-opt-13b-tp1")(
            replica=replica("opt-13b", "a100-80gb", block_size=size),
            block_tokens=4.0,
            fitted_block_size=16,
        )
        return 1e3 * float(made.decode_seconds(10, 5000))

    assert cost(16) == pytest.approx(23.48 + 10 * 0.0607 + 5000 * 5.93e-4)
    assert cost(1) == pytest.approx(23.48 + 10 * 0.0607 + 5000 * 5.93e-4 * 5 / 1.25)
    assert cost(256) < cost(16)


def test_block_tokens_need_the_fitted_block_size() -> None:
    with pytest.raises(ConfigError, match=r"^cost\.block_tokens=4\.0: needs cost\.fitted_block"):
        shipped("cost", "distserve-opt-13b-tp1")(
            replica=replica("opt-13b", "a100-80gb"), block_tokens=4.0
        )
