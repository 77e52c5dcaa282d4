"""One arm under one seed."""
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from pagedsim.metrics.study import Run

@dataclass(frozen=True)
class Job:
    arm: str
    seed: int
    config: dict[str, Any]
    folder: Path

def run_job(job: Job) -> "Run | str":
    return "not yet"
