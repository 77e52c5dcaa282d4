"""The README's pictures, from real runs.

    python -m tests.serve.pictures

What the terminal showed of the first command goes to results/front_door, and the live page of a
simulated server under load to results/serve. The page needs a Chromium; without one it is left as
it was.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pagedsim.experiments.benchmarks.serving import listening
from pagedsim.experiments.regenerate import RESULTS
from tests.serve.chromium import Chromium, find_browser

COMMAND = ("-m", "pagedsim", "experiment=fcfs_vs_priority")
COLUMNS = 100
"""Of the terminal."""
SERVER = (
    *("backend=sim", "model=llama-3.1-8b", "hardware=rtx4090", "memory=prefix"),
    *("memory.blocks=1536", "preemption=swap", "policy=priority", "batching=unified"),
    "server.max_model_len=4096",
)
LOAD = (
    *("workload=sharegpt", "workload.rate=5.5", "workload.requests=2000", "seeds=1"),
    *("workload.client={chat:0.5,search:0.2,code:0.2,batch:0.1}", "report=false", "tracking=none"),
    *("workload.priority={0:0.9,1:0.1}", "workload.prefixes={tokens:160,count:3,share:0.5}"),
)
SECONDS = 65
"""Of load before the picture of the page."""
PROMPT = "Explain in a few sentences why an LLM server keeps its cache in blocks."


def draw_terminal(path: Path) -> None:
    """What the terminal showed, with its colours, as an SVG."""
    with tempfile.TemporaryDirectory() as folder:
        shown = subprocess.run(
            [sys.executable, *COMMAND, f"hydra.run.dir={folder}"],
            env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.replace(folder, "outputs/run")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(f"$ python {' '.join(COMMAND)}")
    console.print(Text.from_ansi(shown))
    console.save_svg(str(path), title="pagedsim")


def draw_page(path: Path, browser: str) -> None:
    """The live page under load, while it streams an answer to a question asked from it."""
    with listening(*SERVER) as child, tempfile.TemporaryDirectory() as folder:
        words = ["bench", f"url={child.url}", *LOAD, f"hydra.run.dir={folder}"]
        bench = subprocess.Popen([sys.executable, "-m", "pagedsim", *words])
        try:
            time.sleep(SECONDS)
            with Chromium(browser) as page:
                page.open(f"{child.url}/")
                page.wait("Number(document.querySelector('#grid').dataset.busy) > 0")
                page.type("[name=prompt]", PROMPT)
                page.type("[name=max_tokens]", "400")
                page.click("#send")
                page.wait("document.querySelector('#answer').textContent.length > 400")
                page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
                page.picture(path)
        finally:
            bench.kill()
            bench.wait()


def main() -> None:
    """Draw both."""
    draw_terminal(RESULTS / "front_door" / "terminal.svg")
    if browser := find_browser():
        draw_page(RESULTS / "serve" / "page.png", browser)
    else:
        print("no Chromium found: page.png is left as it was", file=sys.stderr)


if __name__ == "__main__":
    main()
