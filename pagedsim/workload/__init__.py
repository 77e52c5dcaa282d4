"""Workloads: arrival times, prompt lengths and output lengths of requests.

`synthetic` generates one traffic class, `mix` several, `chat_sessions` and `agents` multi-turn
sessions, `shared_prefix` rate stages over a fixed set of prompts; `trace` reads a file. Each
returns a `Workload`, whose `requests()` are sent to a server.
"""

from pagedsim.core.symbolic_prompt import SymbolicPrompt
from pagedsim.workload.arrivals import (
    Arrivals,
    Burst,
    ClosedLoop,
    FixedInterval,
    Gamma,
    Mode,
    Poisson,
    make_arrivals,
)
from pagedsim.workload.conversations import agents, chat_sessions
from pagedsim.workload.draws import SharedPrefixes, stream
from pagedsim.workload.generated import Traffic, mix, shared_prefix, synthetic
from pagedsim.workload.lengths import (
    SHAPES,
    Empirical,
    Fixed,
    Lengths,
    LogNormal,
    Uniform,
    make_lengths,
)
from pagedsim.workload.predictor import Bucket, Noisy, NoPredictor, Oracle, Predictor, Rank
from pagedsim.workload.recorded import trace
from pagedsim.workload.tokens import (
    BlockPrompts,
    GrowingPrompts,
    PrefixedPrompts,
    Prompts,
)
from pagedsim.workload.traces import FORMATS
from pagedsim.workload.workload import Sessions, Workload

__all__ = [
    "FORMATS",
    "SHAPES",
    "Arrivals",
    "BlockPrompts",
    "Bucket",
    "Burst",
    "ClosedLoop",
    "Empirical",
    "Fixed",
    "FixedInterval",
    "Gamma",
    "GrowingPrompts",
    "Lengths",
    "LogNormal",
    "Mode",
    "NoPredictor",
    "Noisy",
    "Oracle",
    "Poisson",
    "Predictor",
    "PrefixedPrompts",
    "Prompts",
    "Rank",
    "Sessions",
    "SharedPrefixes",
    "SymbolicPrompt",
    "Traffic",
    "Uniform",
    "Workload",
    "agents",
    "chat_sessions",
    "make_arrivals",
    "make_lengths",
    "mix",
    "shared_prefix",
    "stream",
    "synthetic",
    "trace",
]
