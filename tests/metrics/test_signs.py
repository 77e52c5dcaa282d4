"""What is printed beside a change is what it is a change of: two printed means give the printed
change, in sign and in size, in every table and sentence, whatever the seeds' values are."""

from __future__ import annotations

import re
from math import inf, isnan, nan

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import scale_of
from pagedsim.metrics.compare import Comparison, compare, means_of
from pagedsim.metrics.finding import finding, in_words
from pagedsim.metrics.variation import Variation
from pagedsim.report.curves import curves_data, throughput_data
from pagedsim.report.plots import sweep_data
from pagedsim.report.print import latex_of
from pagedsim.report.table import comparison_of, sections
from tests.metrics.tables import arms_with
from tests.metrics.test_one_fact import NUMBER, UNITS

KEYS = ("ttft_p99", "preemptions", "slo_attainment", "output_tokens_per_s")
Range = tuple[float, float]

positive = st.floats(1e-4, 1e3)
VALUES = {
    "ttft_p99": positive | st.just(nan),
    "preemptions": st.integers(0, 9).map(float),
    "slo_attainment": st.floats(0.1, 1) | st.sampled_from((0.0, 1.0)),
    "output_tokens_per_s": positive,
}


@st.composite
def studies(draw: st.DrawFn) -> Arms:
    """Two to four arms under one to five seeds, of which some lack a value."""
    seeds = draw(st.integers(1, 5))
    return arms_with(
        {
            arm: {
                key: draw(st.lists(of, min_size=seeds, max_size=seeds))
                for key, of in VALUES.items()
            }
            for arm in "abcd"[: draw(st.integers(2, 4))]
        },
        baseline=draw(st.sampled_from("ab")),
    )


def reach(text: str) -> Range:
    """The values that are printed so."""
    found = NUMBER.fullmatch(text)
    assert found is not None, text
    number, decimals, unit = found.groups()
    scale = UNITS.get(unit or "", 1.0)
    value = float(number.replace(",", "").replace("−", "-")) * scale
    half = 0.501 * scale * 10.0 ** -len(decimals or "")
    return value - half, value + half


def overlap(one: Range, other: Range) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def agree(ours: str, theirs: str, change: str) -> bool:
    """Whether a printed change may be that from one printed mean to the other."""
    (low, high), (least, most) = reach(ours), reach(theirs)
    if change == "same":
        return overlap((low, high), (least, most))
    if "%" in change or change.startswith("×"):
        factor = (max(low, 0.0) / most, high / least if least > 0 else inf)
        if change.startswith("×"):
            return overlap(factor, reach(change[1:]))
        a, b = reach(change.lstrip("+±"))
        return overlap(factor, (0.0 if change == "−99.9 %" else 1 + a, 1 + b))
    return overlap((low - most, high - least), reach(change.lstrip("+")))


def goes(change: Comparison) -> int:
    """The direction of the means."""
    return (change.ours > change.theirs) - (change.ours < change.theirs)


@given(studies())
def test_cells_and_their_change_agree(study: Arms) -> None:
    means = means_of(study)
    for part in sections(study):
        baseline = part.rows[study.baseline or "a"]
        for arm, row in part.rows.items():
            for key, cell in row.items():
                mean = cell.estimate.mean
                assert isnan(mean) == (key not in means[arm]) or means[arm][key] == mean
                assert not cell.estimate.known or cell.estimate.low <= mean <= cell.estimate.high
                if (change := cell.versus) is None:
                    continue
                assert (mean, baseline[key].estimate.mean) == (change.ours, change.theirs)
                assert agree(cell.text, baseline[key].text, cell.change), (cell, baseline[key])
                signs = {"+": 1, "×": 1, "−": -1}
                assert signs.get(cell.change[0], goes(change)) == goes(change)
                if cell.verdict != "unsure":
                    assert (cell.verdict == "better") == (change.gain is True)


@given(studies())
def test_rows_of_files_agree(study: Arms) -> None:
    """comparison.csv, which is `result.table()` and the comparison in W&B; and table.tex."""
    columns, rows = comparison_of(study)
    for row in (dict(zip(columns, values, strict=True)) for values in rows):
        ours, theirs, ratio = row["ours"], row["theirs"], row["ratio"]
        scale = max(abs(ours), abs(theirs))
        assert abs(row["difference"] - (ours - theirs)) <= 1e-9 * scale
        assert ratio is None or abs(ratio * theirs - ours) <= 1e-9 * scale
        if row["ratio_low"] is not None and row["average"] == "geometric":
            low, high = (theirs * (row[f"ratio_{end}"] - 1) for end in ("low", "high"))
            assert (row["difference_low"], row["difference_high"]) == (low, high)
    table: dict[str, list[str]] = {}
    for line in latex_of(study).replace(r"\%", "%").replace("$-$", "−").splitlines():
        arm, *cells = line.replace(r"$\times$", "×").replace(r"$\pm$", "±").split(" & ")
        table[arm] = [cell.removesuffix(r" \\") for cell in cells]
    texts = re.compile(r"(?:\\textbf\{)?([^{}()]*?)\}?(?: \{\\footnotesize \(?([^()]*)\)?\})?")
    baseline = table[study.baseline or "a"]
    for arm in study.arms:
        for cell, at in zip(table[arm], baseline, strict=True):
            mine, other = texts.fullmatch(cell), texts.fullmatch(at)
            assert mine and other
            assert mine[2] is None or agree(mine[1], other[1], mine[2]), (cell, at)


@given(studies())
def test_sentences_agree(study: Arms) -> None:
    said = re.compile(
        r"(cuts|raises) .*? (?:by ([\d.]+) %|([\d.]+)-fold) \((.*?) to ([^;)]*)[;)]?.*"
    )
    for change in compare(study):
        if (found := said.match(in_words(change))) is None:
            continue
        verb, share, fold, theirs, ours = found.groups()
        assert (verb == "raises") == (change.ours >= change.theirs)
        text = f"×{fold}" if fold else f"{'+' if verb == 'raises' else '−'}{share} %"
        assert agree(ours, theirs, text), in_words(change)
    assert finding(study)


@given(studies())
def test_lines_are_of_the_cells(study: Arms) -> None:
    """Those of a sweep, and curves of arms along a load."""
    study.swept = "memory.blocks"
    for key, panel in zip(KEYS, sweep_data(study).panels, strict=True):
        means = [means_of(study)[arm].get(key, nan) for arm in study.arms]
        factor = scale_of(key, means).factor
        assert np.allclose(panel.series[0].y, np.array(means) * factor, equal_nan=True)
    loads = {arm: {"workload.rate": "ab".index(arm) if arm in "ab" else 2} for arm in study.arms}
    study.variation = Variation(
        loads, ("workload.rate",), {arm: "run" if arm != "d" else "other" for arm in study.arms}
    )
    study.baseline = "a"
    means_at = means_of(study)
    for key, panel in zip(KEYS, curves_data(study).panels, strict=True):
        cells = [
            part.rows["run"][key].estimate.mean for part in sections(study) if key in part.keys
        ]
        drawn = panel.series[0].y[~np.isnan(panel.series[0].y)]
        factor = scale_of(key, [means_at[arm].get(key, nan) for arm in study.arms]).factor
        assert np.allclose(drawn, factor * np.array(cells)[~np.isnan(cells)])
    assert throughput_data(study).panels
