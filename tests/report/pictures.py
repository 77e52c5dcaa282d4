"""Pictures of reports, and how large they are and how fast they open.

    python -m tests.report.pictures FOLDER

Runs the studies below, unless FOLDER has their reports, and takes a picture of each at two widths,
light and dark. The picture of the first command's replay and the table of sizes and times go to
results/report. It needs a Chromium.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

from pagedsim.experiments.regenerate import RESULTS
from tests.serve.chromium import Chromium, find_browser

_ROUTERS = '{turns: ["router=round_robin"], least: ["router=least_requests"]}'
_SERVED = '{fcfs: ["policy=fcfs"], plas: ["policy=plas"]}'
_FLEETS = ("study.splits={TP 1: []}", "study.routers=[round_robin]", "study.short=500", "seeds=1")
STUDIES: dict[str, tuple[str, ...]] = {
    "first": ("experiment=fcfs_vs_priority",),
    "load_curves": ("experiment=load_curves",),
    "cheapest": ("experiment=cheapest_fleet", *_FLEETS),
    "agents": ("experiment=compare", "workload=agents", "memory=prefix", f"study.arms={_SERVED}"),
    "fleet": (
        "experiment=compare",
        "workload.rate=60",
        "fleet.replicas=4",
        f"study.arms={_ROUTERS}",
    ),
}
WIDTHS = {1400: False, 400: True}
"""Whether a width is a phone's."""
OPENINGS = 5
"""How often a report is opened; the median counts."""
SETTLED = 0.5
"""Seconds until canvases have the width of the page."""


def rates(arms: int) -> tuple[str, ...]:
    """A comparison of so many arms."""
    each = ", ".join(f'rate{rate}: ["workload.rate={rate}"]' for rate in range(2, 2 + arms))
    return "experiment=compare", "workload.requests=300", f"study.arms={{{each}}}"


def report_of(words: tuple[str, ...], folder: Path) -> Path:
    """The report of a study, which is run if it is not there."""
    report = folder / "report.html"
    if not report.exists():
        words = (*words, "tracking=none", f"hydra.run.dir={folder}")
        subprocess.run([sys.executable, "-m", "pagedsim", *words], check=True)
    return report


def opened(page: Chromium, report: Path, width: int = 1400, scheme: str = "light") -> float:
    """Open a report with its charts; the seconds that this took of the page's thread."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1}
    page.call("Emulation.setDeviceMetricsOverride", **size, mobile=WIDTHS[width])
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", features=features)
    page.open("about:blank")
    before = busy(page)
    page.open(report.resolve().as_uri())
    page.wait(
        "[...document.querySelectorAll('.chart')].every((one) => one.querySelector('canvas'))"
    )
    return busy(page) - before


def busy(page: Chromium) -> float:
    """Seconds of processor time that the page's thread has taken."""
    page.call("Performance.enable", timeDomain="threadTicks")
    metrics = page.call("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def taken(page: Chromium, path: Path, selector: str | None = None) -> None:
    """A picture of the page, or of an element, with few colours."""
    from PIL import Image

    page.picture(path)
    with Image.open(path) as shot:
        image = shot.convert("RGB")
        if selector is not None:
            box = f"document.querySelector({selector!r}).getBoundingClientRect()"
            left, top, width, height = (
                page.evaluate(f"{box}.{side}") for side in ("left", "top", "width", "height")
            )
            top += page.evaluate("scrollY")
            image = image.crop((left - 16, top, left + width + 16, top + height))
        small = io.BytesIO()
        image.quantize(128).save(small, "png", optimize=True)
    path.write_bytes(small.getvalue())


def table(page: Chromium, folder: Path) -> str:
    """Sizes and times to open of reports of few and many arms."""
    lines = ["| arms | MB | seconds to open |", "|---|---|---|"]
    for arms in (2, 5, 50):
        words = STUDIES["first"] if arms == 2 else rates(arms)
        report = report_of(words, folder / (f"arms-{arms}" if arms > 2 else "first"))
        times = sorted(opened(page, report) for _ in range(OPENINGS))
        size = report.stat().st_size / 1e6
        lines.append(f"| {arms} | {size:.2f} | {times[OPENINGS // 2]:.2f} |")
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    """Print the table, then take all pictures."""
    browser = find_browser()
    if browser is None:
        sys.exit("no Chromium in PATH")
    place = RESULTS / "report"
    place.mkdir(exist_ok=True)
    head = (
        "Sizes of reports, and the processor time that a headless Chromium takes to open one with "
    )
    head += "all of its charts: `python -m tests.report.pictures FOLDER`.\n\n"
    with Chromium(browser) as page:
        sizes = table(page, folder)
        print(sizes)
        (place / "README.md").write_text(head + sizes, encoding="utf-8")
        opened(page, folder / "first" / "report.html")
        time.sleep(SETTLED)
        taken(page, place / "replay.png", ".replay")
        for name, words in STUDIES.items():
            report = report_of(words, folder / name)
            for width in WIDTHS:
                for scheme in ("light", "dark"):
                    opened(page, report, width, scheme)
                    time.sleep(SETTLED)
                    taken(page, folder / f"{name}-{width}-{scheme}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
