# %% [markdown]
# # The capacity of a fleet
# How many requests/s do one and two GPUs serve within an objective, and does the router matter?
# About half a minute.

# %%
import pagedsim as ps

load = {
    "model": "llama-3.1-8b",
    "gpu": "h100",
    "workload": ps.synthetic(requests=3000),
    "seeds": 1,
}

# %% [markdown]
# `capacity` searches for the highest rate of arrivals at which an arm meets all bounds, which are
# in seconds. With fewer requests, a rate that a fleet cannot keep up would pass for a while.

# %%
found = ps.capacity(
    {"ttft_p99": 1.0, "tpot_p99": 0.05},
    {"fleet.replicas": {"one": 1, "two": 2}},
    **load,
)
found

# %% [markdown]
# Per GPU: two share their peaks, so each serves at least what one alone does.

# %%
for gpus, row in enumerate(found.table().to_pylist(), start=1):
    print(f"{row['arm']}: {row['requests_per_s'] / gpus:.1f} requests/s for each GPU")

# %% [markdown]
# At one rate, taking turns against the replica with the fewest requests:

# %%
compared = ps.fleet(
    4,
    router={"turns": "round_robin", "least": "least_requests"},
    metrics=["ttft", "ttft_p95", "load_imbalance"],
    **{**load, "workload": ps.synthetic(rate=100, requests=2000), "seeds": 3},
)
compared

# %%
compared.plot("latency")
