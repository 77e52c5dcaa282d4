# %% [markdown]
# # The engine against the simulator
# A tiny model with random weights on this CPU, scheduled by the same code as a simulation. It needs
# `pip install -c constraints.txt '.[engine]'` and takes about half a minute.

# %%
import pagedsim as ps
from pagedsim.core import SamplingParams

# %% [markdown]
# The engine computes tokens. Its settings are those of a simulation.

# %%
llm = ps.LLM("tiny", device="cpu", batching="unified", memory="prefix")
params = SamplingParams(temperature=0.0, max_tokens=8)
for answer in llm.generate(["Once upon a time", "The scheduler"], params):
    print(answer.outputs[0].token_ids)

# %% [markdown]
# ## Decisions
# The engine serves 30 requests and keeps its plans; the simulator is given its measured times and
# replays them. Every step must be the same.

# %%
ps.experiment("record", backend="engine", seeds=1, folder="recorded")
replayed = ps.experiment("replay", run="recorded")
print(*replayed.finding, sep="\n")

# %% [markdown]
# ## Times
# How long a step takes depends on its work: tokens, sequences, contexts. Here that is fitted to the
# recorded steps, and the table says how far off it is. `experiment=validate` holds
# latencies of other requests against the engine, and takes minutes.

# %%
fitted = ps.experiment("calibrate", run="recorded", folder="fitted")
fitted
