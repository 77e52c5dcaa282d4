"""Workloads: arrival times, prompt lengths and output lengths of requests.

`synthetic` generates one traffic class, `mix` several, `chat_sessions` and `agents` multi-turn
sessions, `shared_prefix` rate stages over a fixed set of prompts; `trace` reads a file. Each
returns a `Workload`, whose `requests()` are sent to a server.
"""

from pagedsim.workload.conversations import agents, chat_sessions
from pagedsim.workload.generated import mix, shared_prefix, synthetic
from pagedsim.workload.predictor import Bucket, Noisy, NoPredictor, Oracle, Predictor, Rank
from pagedsim.workload.recorded import trace
from pagedsim.workload.workload import Sessions, Workload

__all__ = [
    "Bucket",
    "NoPredictor",
    "Noisy",
    "Oracle",
    "Predictor",
    "Rank",
    "Sessions",
    "Workload",
    "agents",
    "chat_sessions",
    "mix",
    "shared_prefix",
    "synthetic",
    "trace",
]
