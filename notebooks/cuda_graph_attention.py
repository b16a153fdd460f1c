# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A CUDA graph around decode
#
# The GPU runs the kernels of a decode step faster than the host can launch them. A CUDA graph launches all of them at
# once. How much does it gain, by model, attention and batch, and what does its memory cost the KV cache?
#
# The pull request that let a serving engine capture its Triton attention measured batch 1, input 128, output 8, on GPUs
# that it does not name (decode median; gains in brackets are worked out here):
#
# | model | attention | with graph | without | gain |
# |---|---|---:|---:|---:|
# | Llama-3-8B | triton | 7.06 ms | 9.28 ms | 1.3x |
# | Llama-3-8B | flashinfer | 7.35 ms | 8.23 ms | (1.12x) |
# | DeepSeek-Coder-V2-Lite, MLA | triton | 6.22 ms | 24.53 ms | 4x |
# | the same, another tester, MLA off | triton | 7.93 ms | 36.45 ms | (4.6x) |
# | the same, another tester, MLA on | triton | 6.21 ms | 19.16 ms | (3.1x) |
#
# Noted there: capture takes memory, so that the share of memory for weights and cache had to drop to 0.85.

# %% [markdown]
# The sweep `cuda-graph-attention`: both models in bf16; Triton attention, and FlashInfer where it is installed; latent
# attention absorbed ("MLA on") and expanded ("MLA off"); with and without a graph; batch 1, 8 and 32. `LIVE` runs it
# here.

# %%
import workbench
from workbench.devices import find_device
from workbench.report.claims import beside
from workbench.report.graphs import captures_table, room_lesson, room_table
from workbench.report.winners import lesson, verdicts, winners
from workbench.sweeps.loader import recording
from workbench.sweeps.presets import preset

# %%
LIVE = False
sweep = preset("cuda-graph-attention", find_device())
results = workbench.sweep(sweep) if LIVE else recording("h200-cuda-graph-attention")
frame = results.frame()
print(results.totals(), *results.notes, sep="\n")

# %% [markdown]
# ## Beside the claim
# Median of a decode step at batch 1. Compare the gains: the milliseconds are those of two GPUs.

# %%
beside("cuda-graph-attention", frame).round(2)

# %% [markdown]
# ## Winners
# With a graph against without, everything else equal. A tie is where the bands from p10 to p90 overlap.

# %%
places = ("model", "attention_backend", "mla_decode", "batch_size")
found = winners(frame, {"graph": "disabled"}, among=("graph",), problem=places)
found.round({"best_us": 1, "baseline_us": 1, "speedup": 2})

# %%
verdicts(found, by=places[:-1])

# %% [markdown]
# Points that could not be run, and why; an attention that plans on the host in every call cannot stand in a graph.

# %%
frame.loc[frame["latency_us"].isna(), [*places, "graph", "status", "reason"]]

# %% [markdown]
# ## What capturing costs
# Seconds and memory of every captured size, and the kernels inside the graph where they were counted.

# %%
captures_table(results).round({"seconds": 2, "MiB": 1})

# %% [markdown]
# ## Graph memory against the KV cache
# How many tokens of KV cache fit beside the weights and what a step works in, without graphs and with them. Compare the
# room lost with the share that was set aside in the pull request.

# %%
room = room_table(results)
room.round({"graphs_MiB": 1, "room_lost": 5})

# %% [markdown]
# ## Right
# The largest error over its budget, the most that a replay changed an eager step beside what it may, and the smallest
# share of positions with the same most likely token as in float32.

# %%
done = frame[frame["latency_us"].notna()]
right = {"error_ratio": "max", "mode_error": "max", "mode_budget": "min", "top1_agreement": "min"}
done.groupby([*places[:-1], "graph"]).agg(right)

# %% [markdown]
# ## What was learned

# %%
print(lesson(found, "A graph around decode"))
print(lesson(found[found["batch_size"] == 1], "The same at batch 1"))
print(room_lesson(room))
