"""`python -m pagedsim bench`: what its words stand for, and its page."""

from __future__ import annotations

from collections.abc import Sequence

HELP = """python -m pagedsim bench url=http://host:port [key=value] ...
  sends a workload to a server that speaks as OpenAI's does (python -m pagedsim serve, vLLM, …)
  and tells what its client sees. It is experiment=bench with backend=http; with an
  experiment= of yours, such as sweep or compare, it is that one with backend=http.
  Needs pip install -c constraints.txt '.[serve]'.

THE SERVER
  url=http://host:port       where it is. A key that it asks for stands in OPENAI_API_KEY; it is
                             neither printed nor kept
  backend.model=NAME         what is asked for (default: the first that /v1/models names)
  backend.endpoint=chat      /v1/chat/completions instead of /v1/completions
  backend.prompt=text        words instead of token ids, for servers that take no ids
  backend.extra={top_p: 0.9} more fields of every request; null takes one away, as in
                             {ignore_eos: null} for servers that refuse what they do not know

THE LOAD (as of every experiment; python -m pagedsim --help has all of it)
  workload=sharegpt          lengths and times of arrivals, or a trace: workload=trace
  workload.requests=100      how many; or workload.duration, in seconds
  workload.rate=1            requests/s on average; with a trace, workload.rate_scale
  workload.arrivals=poisson  poisson | gamma | fixed | burst (all at once) | closed
  workload.users=8           of arrivals=closed: each waits for its answer, then thinks for
                             workload.think_time seconds, then asks again
  backend.concurrency=64     so many requests at once at most; the others wait, and that counts
  backend.warmup=1           requests before the clock starts; if one fails, nothing runs
  backend.timeout=600        seconds after which a request is given up
  seed=0, seeds=1            other requests; the same seed sends the same prompts, of which a
                             prefix cache may still have those of an earlier run
  slo.ttft=1 slo.tpot=0.05   seconds; the table then has goodput

WHAT IT LEAVES, beside report.html, result.json, plots/ and the tables of every experiment
  runs/bench/seed-<n>/vllm_bench.json    what `vllm bench serve` would have written
  record=log.csv             the requests with their times, for experiment=calibrate

EXAMPLES
  # an open loop: 200 chats at 4 requests/s
  python -m pagedsim bench url=http://localhost:8000 workload.requests=200 workload.rate=4
  # a closed loop of 32 users, on the chat endpoint
  python -m pagedsim bench url=http://localhost:8000 backend.endpoint=chat \\
      workload.arrivals=closed workload.users=32
  # latency against rate, in one report
  python -m pagedsim bench url=http://localhost:8000 experiment=sweep study.values=[1,2,4]
  # observe, calibrate, simulate: the server's model and hardware, and the same load
  python -m pagedsim bench url=http://localhost:8000 workload.rate=4 record=log.csv
  python -m pagedsim experiment=calibrate requests=log.csv model=llama-3.1-8b hardware=h100
  python -m pagedsim experiment=single model=llama-3.1-8b hardware=h100 \\
      cost.bandwidth_efficiency=0.87 workload.rate=4 workload.requests=100 seeds=1"""
"""The page."""


def meant(words: Sequence[str]) -> list[str]:
    """The words of Hydra's that those after `bench` stand for.

    >>> meant(["url=localhost:8000", "seeds=2"])
    ['experiment=bench', 'backend.url=localhost:8000', 'seeds=2']
    """
    own = any(word.startswith("experiment=") for word in words)
    said = [f"backend.{word}" if word.startswith("url=") else word for word in words]
    return ["backend=http" if own else "experiment=bench", *said]
