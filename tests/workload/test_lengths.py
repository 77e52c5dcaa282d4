"""Length distributions: the presets have the published means, also after the cut at max_len."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.workload import Fixed, Lengths, LogNormal, Uniform, make_lengths, stream, synthetic
from tests.workload.files import LENGTHS, written

PUBLISHED = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
COUNT = 200_000


def sample(lengths: Lengths, seed: int, count: int = COUNT) -> tuple[np.ndarray, np.ndarray]:
    return lengths.sample(count, stream(seed, "lengths"))


def close(drawn: np.ndarray, mean: float) -> bool:
    """Whether the sample's mean is this one, within four standard errors."""
    return abs(drawn.mean() - mean) < 4 * drawn.std() / len(drawn) ** 0.5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_len", [1024, 2048, 4096])
@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_means(preset: str, max_len: int, seed: int) -> None:
    prompt, output = sample(make_lengths(preset, max_len), seed)
    assert close(prompt, PUBLISHED[preset][0])
    assert close(output, PUBLISHED[preset][1])
    assert (prompt + output).max() <= max_len
    assert min(prompt.min(), output.min()) >= 1


def test_presets_have_the_published_means_without_a_cut() -> None:
    for preset, means in PUBLISHED.items():
        drawn = sample(make_lengths(preset, None), 0)
        assert all(close(column, mean) for column, mean in zip(drawn, means, strict=True))


def test_sharegpt_answers_spread_as_the_papers_memory_figure_implies() -> None:
    # Orca (Oracle): reserved 25.2 % of 63.4 % in use, so E[o²] = 3.88 E[op].
    prompt, output = (column.astype(float) for column in sample(make_lengths("sharegpt", 2048), 0))
    assert (output**2).mean() / (output * prompt).mean() == pytest.approx(3.88, rel=0.03)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mean", "cv", "max_len"), [(500, 2.0, 2048), (3, 0.5, 64), (30, 1, 80)])
def test_any_lognormal_keeps_its_mean_when_cut(
    mean: float, cv: float, max_len: int, seed: int
) -> None:
    drawn = sample(LogNormal(mean, cv, mean, cv, max_len), seed)
    assert close(drawn[0], mean) and close(drawn[1], mean)


def test_a_mean_that_the_cut_forbids_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lengths.prompt_mean=1500: max_len=2048 cuts prompts"):
        LogNormal(1500, 1.0, 100, 1.0, 2048)
    with pytest.raises(ConfigError, match=r"lengths.output_mean=2000: max_len=2048"):
        LogNormal(500, 1.0, 2000, 1.0, 2048)


def test_fixed_and_uniform() -> None:
    prompt, output = sample(Fixed(7, 9), 0, 5)
    assert prompt.tolist() == [7] * 5 and output.tolist() == [9] * 5
    prompt, output = sample(Uniform(1, 4, 10, 10), 0, 10_000)
    assert np.bincount(prompt)[1:] == pytest.approx(2500, abs=250)
    assert set(output.tolist()) == {10}


def test_quantiles_are_met_and_straight_between() -> None:
    shape = {"shape": "quantiles", "prompt": {0: 1, 50: 101, "90": 501, 100: 1001}}
    lengths = make_lengths({**shape, "output": {0: 8, 100: 8}}, None)
    prompt, output = sample(lengths, 0)
    assert (prompt.min(), prompt.max(), set(output)) == (1, 1001, {8})
    for percent, tokens in ((25, 51), (50, 101), (70, 301), (90, 501), (95, 751)):
        assert np.percentile(prompt, percent) == pytest.approx(tokens, rel=0.02)
    assert close(prompt, 0.5 * 51 + 0.4 * 301 + 0.1 * 751)
    cut = make_lengths({**shape, "output": {0: 1, 100: 2000}}, 1200)
    prompt, output = sample(cut, 0)
    assert (prompt + output).max() == 1200
    assert cut.capped(prompt, output) == np.count_nonzero(prompt + output == 1200) > 0


def test_empirical_keeps_pairs_together(tmp_path: Path) -> None:
    path = written(tmp_path, LENGTHS)
    by_sniffing = make_lengths({"shape": "empirical", "path": path}, None)
    columns = {"prompt_column": "num_prefill_tokens", "output_column": "num_decode_tokens"}
    by_name = make_lengths({"shape": "empirical", "path": path, **columns}, None)
    for lengths in (by_sniffing, by_name):
        prompt, output = sample(lengths, 0, 3000)
        assert (prompt == 10 * output).all()
        assert np.bincount(prompt // 100)[1:] == pytest.approx(1000, abs=150)


@pytest.mark.parametrize("shape", ["sharegpt", "uniform", "quantiles", "empirical"])
def test_fewer_are_the_beginning_of_more(shape: str, tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "sharegpt": {},
        "uniform": {"prompt_min": 1, "prompt_max": 9, "output_min": 1, "output_max": 9},
        "quantiles": {"prompt": {0: 1, 100: 9}, "output": {0: 1, 100: 9}},
        "empirical": {"path": written(tmp_path, LENGTHS)},
    }
    lengths = make_lengths({"shape": shape, **settings[shape]}, 2048)
    few, many = sample(lengths, 0, 10), sample(lengths, 0, 1000)
    assert [c.tolist() for c in few] == [c[:10].tolist() for c in many]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("shargpt", "unknown lengths.shape 'shargpt': did you mean 'sharegpt'"),
        ({"shape": "fixed", "promt": 1, "output": 2}, "did you mean 'prompt'"),
        ({"shape": "fixed", "prompt": 1}, "lengths.output: must be given, for lengths.shape=fixed"),
        ({"shape": "fixed", "prompt": 0, "output": 2}, "lengths.prompt=0: must be a whole number"),
        ({"prompt": 1}, "lengths: needs shape="),
        ({"shape": "alpaca", "prompt": 1}, "lengths.prompt: no such setting of lengths.shape=al"),
        ({"shape": "uniform", "prompt_min": 5, "prompt_max": 4, "output_min": 1, "output_max": 1},
         "lengths.prompt_max=4: must be a whole number from 5"),
        ({"shape": "empirical", "path": "/nowhere/x.csv"}, "there is no folder /nowhere"),
        ({"shape": "sharegpt", "max_len": 5}, "is a setting of the workload"),
        (7, "lengths=7: must be a shape"),
        ({"shape": "quantiles", "prompt": {0: 1, 90: 5}, "output": {0: 1, 100: 2}},
         "lengths.prompt: must have the percents 0 and 100"),
        ({"shape": "quantiles", "prompt": {0: 7, 50: 5, 100: 9}, "output": {0: 1, 100: 2}},
         "lengths.prompt.50=5: must be a whole number from 7"),
        ({"shape": "quantiles", "prompt": {0: 1, "half": 5, 100: 9}, "output": {0: 1, 100: 2}},
         "lengths.prompt='half': must be a number from 0 to 100"),
        ({"shape": "quantiles", "prompt": 5, "output": {0: 1, 100: 2}},
         "lengths.prompt=5: must be lengths by percent"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(lengths: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        synthetic(requests=3, rate=1.0, lengths=lengths)  # type: ignore[arg-type]
    assert message in str(error.value)
