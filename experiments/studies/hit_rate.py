"""Hit rate: what a prefix cache finds of a workload's prompts, and what there was to find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.metrics.files import write_json
from pagedsim.metrics.notice import added_up
from pagedsim.report.percent import percent
from pagedsim.run.errand import Errand
from pagedsim.run.folder import kept_configuration
from pagedsim.run.job import Job
from pagedsim.run.parts import backend_of
from pagedsim.run.summaries import run_probes
from pagedsim.user_error import Interruption, UserError, shown
from pagedsim.workload import Workload


class Ideal(NamedTuple):
    """Of all prompts in their order, with a memory that forgets nothing."""

    blocks: int
    """Blocks of the prompts, the last of each counted though it may not be full."""
    found: int
    """Those that an earlier prompt began with, too, and all before them."""
    tokens: int
    found_tokens: int


def ideal(workload: Workload, block: int) -> Ideal:
    """What there is to find in blocks of so many tokens."""
    assert workload.prompts is not None
    seen: set[tuple[object, ...]] = set()
    numbers: dict[tuple[object, ...], int] = {}
    blocks = found = tokens = found_tokens = 0
    for row in range(len(workload)):
        prompt = workload.prompts[row]
        length, before, fresh = len(prompt), -1, False
        for start in range(0, length, block):
            key = (before, prompt[start : start + block])
            fresh = fresh or key not in seen
            blocks += 1
            if fresh:
                seen.add(key)
            else:
                found += 1
                found_tokens += min(block, length - start)
            before = numbers.setdefault(key, len(numbers))
        tokens += length
    return Ideal(blocks, found, tokens, found_tokens)


@dataclass(frozen=True)
class HitRate(Errand):
    """One run, of which only the cache is of interest."""

    seed: int = 0

    def perform(self, folder: Path) -> None:
        config = kept_configuration(folder)
        if config["memory"].get("kind") != "prefix":
            raise ConfigError(f"memory.kind={config['memory'].get('kind')}: must be prefix")
        workload = backend_of(config).workload(config["workload"], self.seed)
        if workload.prompts is None:
            raise ConfigError(
                "workload: says nothing of what is in its prompts; workload=mooncake does, and "
                "workload.prefixes"
            )
        block = config["memory"]["block_size"]
        job = Job("run", self.seed, config, folder / "runs" / "run" / f"seed-{self.seed}")
        runs = run_probes([job], 1)
        if runs.interrupted:
            raise Interruption("")
        if runs.failed:
            raise UserError([str(failure) for failure in runs.failed.values()])
        summary = runs.finished["run", self.seed].summary
        best = ideal(workload, block)
        cached = int(summary["cached_tokens"])
        record = {
            "requests": len(workload),
            "block_size": block,
            "memory_blocks": summary["total_blocks"],
            "ideal": best._asdict(),
            "cached_tokens": cached,
            "share_of_blocks": cached / block / best.blocks,
            "ideal_share_of_blocks": best.found / best.blocks,
            "share_of_tokens": cached / best.tokens,
            "ideal_share_of_tokens": best.found_tokens / best.tokens,
        }
        write_json(folder / "result.json", record)
        print(
            f"{len(workload):,} requests, {best.blocks:,} blocks of {block} tokens in their "
            f"prompts; a memory of {summary['total_blocks']:,} blocks"
        )
        for what in ("blocks", "tokens"):
            share, most = record[f"share_of_{what}"], record[f"ideal_share_of_{what}"]
            print(f"found     {percent(share, 2)} of {what}; ideally {percent(most, 2)}")
        for note in added_up([summary]):
            print(f"note: {note}")
        print(f"results   {shown(folder / 'result.json')}")
