"""Everything measured that the repository has, as rows with their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal

from pagedsim.fidelity.external_log import read_log
from pagedsim.fidelity.step_tables.alone import alone
from pagedsim.fidelity.step_tables.cell import Cell
from pagedsim.fidelity.step_tables.grid import grid
from pagedsim.fidelity.step_tables.layouts import Table, read_table
from pagedsim.fidelity.step_tables.schedule import Schedule, scheduled
from pagedsim.fidelity.step_tables.sheets import hardware_named, model_named
from pagedsim.run.pool import inside_a_worker
from pagedsim.run.runs import cores

DATA = Path(__file__).parents[1] / "data" / "step-tables"
"""Where tables are that come with pagedsim."""
LOGS = Path(__file__).parents[2] / "tests" / "experiments" / "data"
"""Where logs of servers are."""
ALONE = {
    "vllm-0.11-llama-2-7b": ("llama-2-7b", "h100"),
    "vllm-0.11-codellama-34b": ("codellama-34b", "h100"),
}
"""Those with requests that had the server to themselves: the model and the GPU."""
ALONE_STACK = "vllm-2026"
FITTED = ("splitwise", "llm-inference-bench-a100", "inferencemax-h100", *ALONE)
"""What the constants in `hardware.py` and conf/stack are fitted to; the others are held out."""
GRID, GRID_STACK = "distserve", "vllm-2023"
GRID_COSTS = ("distserve-opt-13b-tp1", "distserve-opt-13b-tp2", "distserve-opt-66b-tp4")
"""DistServe's fits of vLLM's steps, in conf/cost, and the stack of their time. Those of its own
engine are there as well, and tell nothing of vLLM's."""
Rows = Sequence[tuple[Cell, Schedule]]


def tables(paths: Sequence[str] | None, stack: str | None) -> list[Table]:
    """Those of a user; or all that come with pagedsim, rows of logs, and what others fitted."""
    if paths is not None:
        return [read_table(path, stack) for path in paths]
    found = [read_table(path, stack) for path in sorted(DATA.glob("*.csv"))]
    for name, (model, gpu) in ALONE.items():
        log = read_log(LOGS / f"{name}.csv")
        shapes = model_named(model), hardware_named(gpu)
        found.append(Table(name, alone(log, name, *shapes, stack or ALONE_STACK), {}))
    fits = [cell for name in GRID_COSTS for cell in grid(GRID, name, stack or GRID_STACK)]
    found.append(Table(GRID, fits, {}))
    return sorted(found, key=lambda table: (table.name not in FITTED, table.name))


def planned(
    tables: Sequence[Table], jobs: int | None, say: Callable[[str], object]
) -> list[tuple[Cell, Schedule]]:
    """The steps of all rows, planned on all cores; says when those of a table are there."""
    cells = [cell for table in tables for cell in table.cells]
    workers = min(jobs or cores(), len(cells))
    if workers == 1 or inside_a_worker():
        return list(_told(tables, map(scheduled, cells), say))
    # A Ctrl-C reaches all processes, and one that ends by it says nothing.
    with ProcessPoolExecutor(workers, None, signal, (SIGINT, SIG_DFL)) as pool:
        return list(_told(tables, pool.map(scheduled, cells, chunksize=4), say))


def _told(
    tables: Sequence[Table], schedules: Iterator[Schedule], say: Callable[[str], object]
) -> Iterator[tuple[Cell, Schedule]]:
    for table in tables:
        for cell in table.cells:
            yield cell, next(schedules)
        say(f"{table.name}: {len(table.cells)} rows planned")
