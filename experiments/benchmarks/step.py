"""A whole decode step of the engine, against what its bytes take at the speed of a copy.

    python -m experiments.benchmarks.step
    python -m experiments.benchmarks.step --device cpu --quick    (the same way, without a GPU)

A model of Llama-3.1-8B's shape with random weights, 64 requests of about 1,024 tokens. Its limit is
the time that its weights, but for the embeddings, and all keys and values take to be read once, at
the speed of a device copy that is timed in the same run. *Forward* is the runner's part by the
GPU's clock; *step* is `engine.step` by the host's, many in a row, all that the host does included.

Both forward passes run with and without CUDA graphs, each with and without `async_scheduling`, with
keys and values in 16 and in 8 bits. They are greedy but for one arm, which draws its tokens with a
temperature and top-p; what drawing takes on the GPU is told with it.

First the logits of a step must be transformers' own, as near to them in float32 as transformers is
in the model's precision (judge.py), tokens with `async_scheduling` must be those without, and drawn
ones those that a CPU draws of the same logits; what is wrong is not timed. Results go to
experiments/results/<GPU>/step.json.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.benchmarks.arms import DTYPE, Arm, arms, size_of
from experiments.benchmarks.decoding import Bench, has_graphs
from experiments.benchmarks.device import device_of, facts, options, table
from experiments.benchmarks.results import before, folder, keep, told


def main(words: Sequence[str] | None = None) -> None:
    """Measure all of them; print a table, and keep the results."""
    words = sys.argv[1:] if words is None else words
    parser = options(__doc__)
    parser.add_argument("--headlines", action="store_true", help="what bars are about, alone")
    asked = parser.parse_args(words)
    device = device_of(asked)
    torch.set_num_threads(1)
    place = folder(device, asked)
    size = size_of(asked.quick)
    result: dict[str, Any] = {
        **facts(device, "experiments.benchmarks.step", words),
        "model": size.shape.name,
        "dtype": DTYPE,
        "batch": size.batch,
        "rounds": asked.rounds,
        "quick": asked.quick,
    }
    graphs = has_graphs(device)
    wanted = [arm for arm in arms(graphs) if arm.headline(graphs) or not asked.headlines]
    result["arms"] = whole(before(place, "step", result, "arms"), wanted) if asked.resume else []
    there = {one["arm"] for one in result["arms"]}
    bench: Bench | None = None
    for arm in wanted:
        if str(arm) in there:
            continue
        bench = bench or Bench(size, device, asked.rounds, asked.quick)
        result["arms"].append(bench.measured(arm))
        keep(place, "step", result)
        print(line(result["arms"][-1]), file=sys.stderr, flush=True)
    print(written(result))
    told(place, "step")
    if failed := [one["arm"] for one in result["arms"] if "seconds" not in one]:
        sys.exit(f"not timed: {'; '.join(failed)}")


def whole(known: Sequence[dict[str, Any]], wanted: Sequence[Arm]) -> list[dict[str, Any]]:
    """Those of the known lines that need not be measured again.

    With async_scheduling tokens are held against those without: both are measured, or neither.
    """
    timed = {one["arm"]: one for one in known if "seconds" in one}
    for arm in wanted:
        if arm.ahead and str(arm) not in timed:
            timed.pop(str(arm._replace(ahead=False)), None)
    return list(timed.values())


def line(found: Mapping[str, Any]) -> str:
    """What is said of one while others go on."""
    if "failed" in found:
        return f"{found['arm']}: {found['failed']}, not timed"
    if "seconds" not in found and found["sampled"]:
        return f"{found['arm']}: draws other tokens than a CPU, not timed"
    if "seconds" not in found:
        return f"{found['arm']}: off by {found['error']:.2g} of the norm, not timed"
    forward = found.get("forward_to_limit")
    said = "" if forward is None else f"forward {forward:.2f}, "
    return f"{found['arm']}: {said}step {found['to_limit']:.2f} times the limit"


def written(result: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    head = ["", "limit ms", "forward ms", "of it", "step ms", "of it", "draw ms"]
    rows = [
        [
            one["arm"],
            f"{one['limit_seconds'] * 1e3:.3g}",
            *_cells(one.get("forward_seconds"), one.get("forward_to_limit")),
            *_cells(one["seconds"], one["to_limit"]),
            f"{one['sample_seconds'] * 1e3:.3g}" if "sample_seconds" in one else "",
        ]
        for one in result["arms"]
        if "seconds" in one
    ]
    title = f"{result['model']}, {result['dtype']}, {result['batch']} requests, {result['device']}"
    return f"{title}, torch {result['torch']}, {result['date']}\n\n{table(head, rows)}"


def _cells(seconds: float | None, ratio: float | None) -> list[str]:
    if seconds is None or ratio is None:
        return ["", ""]
    return [f"{seconds * 1e3:.3g}", f"{ratio:.2f} ×"]


if __name__ == "__main__":
    main()
