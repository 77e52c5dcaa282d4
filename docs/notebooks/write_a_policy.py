# %% [markdown]
# # Write a policy
# A class in a cell, compared with first come, first served. A few seconds.

# %%
import pagedsim as ps
from pagedsim.core import PagedsimError, Request, ServerState

# %% [markdown]
# A rank is a number; smaller goes first. Here short prompts go first, and each second of waiting
# counts as many tokens as the setting says. A policy sees what a real server knows about a request,
# and never its true output length.


# %%
class ShortFirst(ps.Policy):
    """The shortest prompt first; each second of waiting is worth some tokens."""

    rank_changes = "never"  # prompt and arrival stay, so a request is ranked once

    def __init__(self, tokens_per_second: float = 100.0) -> None:
        self.tokens_per_second = tokens_per_second

    def rank(self, request: Request, state: ServerState) -> float:
        assert request.arrival is not None
        return request.prompt_len + self.tokens_per_second * request.arrival


# %% [markdown]
# An object, or the class with its settings, is the value of `policy`. Each run gets a copy.

# %%
load = {"model": "llama-3.1-8b", "gpu": "h100", "workload": ps.synthetic(rate=40, requests=1500)}
result = ps.compare(
    policy={
        "fcfs": "fcfs",
        "little": ps.option(ShortFirst, tokens_per_second=10.0),
        "much": ShortFirst(1000.0),
    },
    metrics=["ttft", "ttft_p95", "e2e"],
    seeds=3,
    **load,
)
result

# %% [markdown]
# Which requests pay for it?

# %%
result.plot("latency")

# %% [markdown]
# A mistake is one line with the class, the hook, the answer and what is allowed. What the code
# itself raises is the cause of the line, with its trace.


# %%
class Mistaken(ShortFirst):
    """Answers what is no number."""

    def rank(self, request: Request, state: ServerState) -> float:
        return float("nan")


try:
    ps.simulate(policy=Mistaken(), seeds=1, **load)
except PagedsimError as error:
    print(error)
