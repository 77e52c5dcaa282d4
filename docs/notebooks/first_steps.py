# %% [markdown]
# # First steps
# Two policies on the same requests, and what a result has. The cells of this file open in VS Code
# and, with jupytext, in Jupyter. A few seconds.

# %%
import pagedsim as ps

# %% [markdown]
# Llama 3.1 8B on an H100, 1,500 requests with the lengths of ShareGPT. At 40 requests/s they wait,
# so that an order matters. `sjf` serves the shortest predicted answer first; `predictor` says how
# good predictions are.

# %%
result = ps.compare(
    model="llama-3.1-8b",
    gpu="h100",
    workload=ps.synthetic(rate=40, requests=1500),
    policy={"fcfs": "fcfs", "shortest": "sjf"},
    predictor="noisy",
    seeds=3,
)
result  # the table, with a sentence for what was found

# %% [markdown]
# Every arm serves the same requests, seed by seed, so differences are paired. Each has its
# confidence interval:

# %%
for row in result.table().to_pylist():
    if row["arm"] == "shortest":
        low, high = row["difference_low"], row["difference_high"]
        print(f"{row['metric']:>18}: {row['difference']:+.4g}  [{low:.4g}, {high:.4g}]")

# %% [markdown]
# Figures have names; a notebook shows one that is the last value of a cell.

# %%
print(result.plots)
result.plot("latency")

# %% [markdown]
# All requests, steps and preemptions are tables of pyarrow (`.to_pandas()`): how long did the
# longest prompts wait for their first token?

# %%
requests = result.requests.to_pylist()
for arm in ("fcfs", "shortest"):
    rows = [row for row in requests if row["arm"] == arm]
    rows.sort(key=lambda row: row["prompt_tokens"])
    waits = [row["first_token"] - row["arrival"] for row in rows[-150:]]
    print(f"{arm:>8}: {sum(waits) / len(waits):.2f} s in the mean of {len(waits)}")

# %% [markdown]
# The command line makes the same: `python -m pagedsim experiment=compare ...`; `result.report`
# writes what it leaves, with a page for a browser.

# %%
print(result.report("first-steps"))
