"""The README's pictures, from a real run.

    python -m pagedsim.experiments.screenshots [--browser chromium]

Runs the default experiment, and puts what the terminal showed and what the report's page looks
like into experiments/results/front_door. The page needs a Chromium; without one only the terminal
is drawn.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pagedsim.experiments.chromium import find_browser

RESULTS = Path(__file__).parent / "results" / "front_door"
COMMAND = ("-m", "pagedsim", "experiment=fcfs_vs_priority")
COLUMNS = 100


def run(folder: Path) -> str:
    """The default experiment, its results in `folder`; returns what the terminal showed."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    done = subprocess.run(
        [sys.executable, *COMMAND, f"hydra.run.dir={folder}"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.replace(str(folder), "outputs/run")


def draw_terminal(shown: str, path: Path) -> None:
    """The text with its colours as an SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(f"$ python {' '.join(COMMAND)}")
    console.print(Text.from_ansi(shown))
    console.save_svg(str(path), title="pagedsim")


def draw_page(report: Path, path: Path, browser: str) -> None:
    """The page as a PNG, as a browser shows it."""
    subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--window-size=1100,2640", f"--screenshot={path}", report.as_uri()),
        ],
        stderr=subprocess.DEVNULL,
        check=True,
    )


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--browser", default=find_browser(), help="a Chromium's program")
    browser = parser.parse_args().browser
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        draw_terminal(run(folder), RESULTS / "terminal.svg")
        if browser:
            draw_page(folder / "report.html", RESULTS / "report.png", browser)
        else:
            print("no Chromium found: report.png is left as it was", file=sys.stderr)


if __name__ == "__main__":
    main()
