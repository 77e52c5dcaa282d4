"""Prefix-cache hit rate of a workload, and its upper bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.metrics.result import Listing, added_up
from pagedsim.report.numbers import percent
from pagedsim.run.job import Arm, Job
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.run import RunSpec, memory_target
from pagedsim.spec.words import key_of
from pagedsim.workload import Workload


class Ideal(NamedTuple):
    """Upper bound of hits over all prompts in order, with unlimited memory."""

    blocks: int
    """Blocks of the prompts, the last of each counted though it may not be full."""
    found: int
    """Blocks in a prefix of an earlier prompt."""
    tokens: int
    found_tokens: int


def ideal(workload: Workload, block: int) -> Ideal:
    """The upper bound for a block size."""
    assert workload.prompts is not None
    seen: set[tuple[object, ...]] = set()
    numbers: dict[tuple[object, ...], int] = {}
    blocks = hits = tokens = found_tokens = 0
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
                hits += 1
                found_tokens += min(block, length - start)
            before = numbers.setdefault(key, len(numbers))
        tokens += length
    return Ideal(blocks, hits, tokens, found_tokens)


@dataclass(frozen=True)
class HitRate(Study):
    """A study of one run that reports cache hits."""

    title: str
    question: str

    keeps_tables = False  # large for a long trace, and not shown

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        changes = {} if runs.jobs else _memory(runs)
        return [Arm("run", seeds=[runs.config["seed"]], changes=changes)]

    def check(self, jobs: Sequence[Job]) -> None:
        config = jobs[0].config
        if (memory := memory_target(config["memory"])) != "prefix":
            raise ConfigError(f"memory={memory}: must be prefix")
        if _workload(jobs[0]).prompts is None:
            raise ConfigError(
                "workload: says nothing of what is in its prompts; workload=mooncake does, and "
                "workload.prefixes"
            )

    def analyse(self, runs: Runs) -> Analysis:
        (job,) = runs.jobs
        summary = runs.finished["run", job.number].summary
        block, workload = job.config["memory"]["block_size"], _workload(job)
        best, cached = ideal(workload, block), int(summary["cached_tokens"])
        shares = {
            "blocks": (cached / block / best.blocks, best.found / best.blocks),
            "tokens": (cached / best.tokens, best.found_tokens / best.tokens),
        }
        return Analysis(
            finding=[
                f"The cache finds {percent(cached, 2)} of the {what} of {summary['requests']:,} "
                f"prompts; with a memory that forgets nothing there are {percent(most, 2)} to find."
                for what, (cached, most) in shares.items()
            ],
            listings=[
                Listing(
                    f"Found in {best.blocks:,} blocks of {block} tokens, of which memory holds "
                    f"{summary['total_blocks']:,}",
                    ["share of", "found", "ideally"],
                    [[what, *(percent(v, 2) for v in both)] for what, both in shares.items()],
                )
            ],
            notes=[*_coarser(workload, block, best), *added_up([summary])],
            data={
                "requests": summary["requests"],
                "block_size": block,
                "memory_blocks": summary["total_blocks"],
                "ideal": best._asdict(),
                "cached_tokens": cached,
                "share_of_blocks": shares["blocks"][0],
                "ideal_share_of_blocks": shares["blocks"][1],
                "share_of_tokens": shares["tokens"][0],
                "ideal_share_of_tokens": shares["tokens"][1],
            },
            table=[
                {"of": what, "found": cached, "ideal": most}
                for what, (cached, most) in shares.items()
            ],
        )


def _memory(runs: Runs) -> dict[str, int]:
    """The block size of the trace, and at least as many blocks as hold all of its tokens, unless
    the command sets them."""
    config = runs.config
    given = {key_of(word) for word in runs.spec.words}
    if "memory" in given or "memory.block_size" in given or not config["memory"]:
        return {}
    workload = RunSpec(config, config["seed"]).workload()
    if workload.prompts is None or (block := workload.prompts.block) is None:
        return {}
    if "memory.blocks" in given:
        return {"memory.block_size": block}
    tokens = workload.prompt_len.astype(np.int64) + workload.output_len
    blocks = int((-(-tokens // block)).sum())
    return {"memory.block_size": block, "memory.blocks": max(blocks, config["memory"]["blocks"])}


def _coarser(workload: Workload, block: int, best: Ideal) -> Iterator[str]:
    """A note if blocks of this size hide shared prompts that the trace's block size shows."""
    trace_block = workload.prompts.block if workload.prompts is not None else None
    if trace_block is not None and block > trace_block:
        finer = ideal(workload, trace_block)
        yield (
            f"the trace names blocks of {trace_block} tokens, and by them {_of_tokens(finer)} of "
            f"the tokens are there to find; memory.block_size={block} leaves {_of_tokens(best)}"
        )


def _of_tokens(best: Ideal) -> str:
    return percent(best.found_tokens / best.tokens, 2)


def _workload(job: Job) -> Workload:
    return RunSpec(job.config, job.seed).workload()
