"""Workloads: who arrives when, with how long a prompt and how long an answer.

`synthetic` draws one, `mix` draws one of several classes, `chat_sessions` and `agents` draw one of
sessions whose turns wait for answers, `shared_prefix` one of stages over the same prompts, `trace`
reads one from a file; each gives a `Workload`, whose `requests()` are what a server is fed with.
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
from pagedsim.workload.choices import SharedPrefixes
from pagedsim.workload.conversations import agents, chat_sessions
from pagedsim.workload.generated import mix, synthetic
from pagedsim.workload.lengths import (
    SHAPES,
    Empirical,
    Fixed,
    Lengths,
    LogNormal,
    Uniform,
    make_lengths,
)
from pagedsim.workload.predictor import Bucket, Nobody, Noisy, Oracle, Predictor, Rank
from pagedsim.workload.recorded import trace
from pagedsim.workload.sessions import Sessions
from pagedsim.workload.stages import shared_prefix
from pagedsim.workload.streams import stream
from pagedsim.workload.tokens import (
    BlockPrompts,
    GrowingPrompts,
    PrefixedPrompts,
    Prompts,
)
from pagedsim.workload.traces import FORMATS
from pagedsim.workload.traffic import Traffic
from pagedsim.workload.workload import Workload

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
    "Nobody",
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
