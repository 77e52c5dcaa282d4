"""`python -m pagedsim serve` with a fleet: one replica is killed, and nothing is lost."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

pytest.importorskip("fastapi")

from pagedsim.experiments.benchmarks.serving import Child, listening
from tests.conftest import Call
from tests.serve.routers import numbers
from tests.serve.serving import until

FLEET = ("fleet.replicas=4", "router._target_=tests.serve.routers.ByLength", "memory=prefix")
TOKENS = 200
LOAD = (
    *("workload=fixed", "workload.requests=60", "workload.rate=20", "seeds=1"),
    *("workload.lengths.prompt=120", f"workload.lengths.output={TOKENS}"),
    *("tracking=none", "report=false"),
)


def router_of(child: Child) -> dict[str, float]:
    return numbers(httpx.get(f"{child.url}/metrics", timeout=20).text)


def kill_a_replica_that_answers(child: Child) -> None:
    """Kill the replica that serves most, as it does."""
    until(lambda: router_of(child)['requests_in_flight{replica="replica-0"}'] > 2, 120)
    children = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children").read_text()
    servers = [
        int(pid)
        for pid in children.split()
        if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(min(servers), signal.SIGKILL)


def rows(folder: Path) -> list[dict[str, Any]]:
    (table,) = folder.rglob("seed-0/requests.parquet")
    return pq.read_table(table).to_pylist()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
@pytest.mark.parametrize("engine", [False, True], ids=["sim", "engine"])
def test_a_killed_replica_loses_nothing(call: Call, tmp_path: Path, engine: bool) -> None:
    pytest.importorskip("torch")
    words = ("backend=engine",) if engine else ()
    with listening(*FLEET, *words, "port=0") as child:
        killer = Thread(target=kill_a_replica_that_answers, args=(child,))
        killer.start()
        code, _, errors = call("bench", f"url={child.url}", *LOAD, "hydra.run.dir=served")
        killer.join()
        assert code == 0, errors
        until(lambda: router_of(child)['replica_up{replica="replica-0"}'] == 1, 120)  # anew
        said = router_of(child)
    failures = "fleet.failures=[{replica: 0, at: 1, for: 1}]"
    call("experiment=single", *FLEET, *LOAD, failures, "hydra.run.dir=simulated")
    served, simulated = rows(tmp_path / "served"), rows(tmp_path / "simulated")
    assert len(served) == len(simulated) == 60
    for ours, theirs in zip(served, simulated, strict=True):
        assert (ours["state"], ours["output_tokens"]) == (theirs["state"], theirs["output_tokens"])
        assert (ours["state"], ours["output_tokens"]) == ("finished", TOKENS)
    assert said["retries_total"] >= 1
    assert (
        said['requests_total{replica="replica-2"}']
        == 0
        < said['requests_total{replica="replica-1"}']
    )
