"""Latency of each order against the rate of arrivals, beside the curves that were published."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from experiments.papers.load_curve import sustained
from experiments.papers.size_answers import Arms, cell, in_words
from experiments.papers.size_curve import MEAN, Curve, Measured
from experiments.papers.size_pictures import draw_curves
from pagedsim.metrics.compare import Estimate
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.study import Reading


def read_curves(curves: Mapping[str, Curve], base: str, arms: Arms) -> Reading:
    """Rows, a table for each curve, and the picture."""
    every = [Measured(name, curve, base, arms) for name, curve in curves.items()]
    data = {"curves": {one.name: _data(one) for one in every}, "base": base}
    drawing = Drawing(
        "Latency against rate",
        "Mean seconds a token, from arrival to the last one. Hollow and dotted: as published. The "
        "line across: the bound that a sustained rate keeps.",
        partial(draw_curves, data),
    )
    return Reading(
        finding=[words for one in every if (words := _sentence(one))],
        rows=[row for one in every for row in (*_sustained(one), *_most(one), *_passes(one))],
        listings=[_listing(one) for one in every],
        data=data,
        drawings={"load": drawing} if every else {},
    )


def _sentence(one: Measured) -> str:
    """Of what was published of a curve: ours first."""
    words = []
    for row in (row for row in (*_sustained(one), *_most(one)) if row.published is not None):
        ours = "more than was tried" if math.isnan(row.ours) else f"{cell(row.ours)} times"
        words.append(f"{row.what.partition(': ')[2]}: {ours} (published {_told(row)})")
    return f"{one.name}: {'; '.join(words)}." if words else ""


def _told(row: Row) -> str:
    if isinstance(row.published, tuple):
        return f"up to {row.published[1]:g}"
    return cell(math.nan if row.published is None else row.published)


def _sustained(one: Measured) -> Iterator[Row]:
    curve, base = one.curve, one.base
    if curve.bound is None:
        return
    for order in curve.lines(base)[1:]:
        for measure in [MEAN, *(name for name in curve.published if name != MEAN)]:
            ours = one.sustained_ratio(order, measure)
            told = [sustained(curve.told(measure, name), curve.bound) for name in (order, base)]
            row = Row(
                f"{one.name}: rate at {curve.bound:g} s a token ({measure}), {order} / {base}",
                ours.mean,
                _number(told[0] / told[1]),
                "×",
                _beside(one, order, measure, ours),
            )
            if row.published is not None or ours.known:
                yield row


def _beside(one: Measured, order: str, measure: str, ours: Estimate) -> str:
    """What stands behind a ratio of rates: its interval, and how far the base is off itself."""
    parts = [f"ours {in_words(ours)}"] if ours.known else []
    told, line = one.curve.told(measure, one.base), one.line(one.base, measure)
    if one.curve.told(measure, order) and (both := sorted(told.keys() & line.keys())):
        ends = " and ".join(
            f"{cell(line[rate])} s here and {cell(told[rate])} s there at {rate:g}/s"
            for rate in (both[0], both[-1])
        )
        parts.append(f"a token of {one.base} takes {ends}")
    return "; ".join(parts)


def _most(one: Measured) -> Iterator[Row]:
    for order in one.curve.lines(one.base)[1:]:
        gains = one.gains(order)
        rate = max(gains, key=lambda at: gains[at].mean)
        told = {at: gain for at, gain in one.told_gains(order).items() if at in gains}
        printed: float | tuple[float, float] | None = max(told.values(), default=None)
        why = f"ours at {rate:g}/s: {in_words(gains[rate])}"
        if told:
            why += f"; theirs at {max(told, key=lambda at: told[at]):g}/s"
        if order in one.curve.most:
            printed = (1.0, one.curve.most[order])  # "up to"
        what = f"{one.name}: seconds a token, {one.base} / {order} where that is most"
        yield Row(what, gains[rate].mean, printed, "×", why)


def _passes(one: Measured) -> Iterator[Row]:
    for order, multiple in one.curve.passes.items():
        gains = {rate: gain.mean for rate, gain in one.gains(order).items()}
        rate = sustained(gains, multiple)
        why = f"at most {cell(max(gains.values()))} times" if math.isnan(rate) else ""
        what = f"{one.name}: rate at which {one.base} takes {multiple:g} times as long as {order}"
        yield Row(what, rate, unit="/s", why=why)


def _listing(one: Measured) -> Listing:
    """Rate by rate: how much longer the base takes than each line, as published beside ours."""
    curve, base = one.curve, one.base
    others = curve.lines(base)[1:]
    told = {order: one.told_gains(order) for order in others}
    head = ["requests/s", "load", f"{base}, s a token", *(f"{base} / {other}" for other in others)]
    printed = [other for other in others if told[other]]
    head += ["published: s a token" for _ in printed[:1]]
    head += [f"published: {base} / {other}" for other in printed]
    rows = []
    for rate, seconds in one.line(base).items():
        row = [f"{rate:g}", cell(rate / one.capacity), cell(seconds)]
        row += [in_words(one.gain(other, rate)) for other in others]
        row += [cell(curve.told(MEAN, base).get(rate, math.nan)) for _ in printed[:1]]
        row += [cell(told[other].get(rate, math.nan)) for other in printed]
        rows.append(row)
    note = (
        f"Load: the rate over the {cell(one.capacity)} requests/s that {base} finishes where most "
        "come. In brackets: 95 % confidence."
    )
    return Listing(f"{one.name}: mean seconds a token", head, rows, note)


def _data(one: Measured) -> dict[str, Any]:
    def points(line: Mapping[float, float]) -> dict[str, list[float]]:
        return {"rate": list(line), "seconds": list(line.values())}

    lines = one.curve.lines(one.base)
    told = {order: one.curve.told(MEAN, order) for order in lines}
    return {
        "bound": one.curve.bound,
        "lines": {order: points(one.line(order)) for order in lines},
        "published": {order: points(line) for order, line in told.items() if line},
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
