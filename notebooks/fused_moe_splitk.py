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
# # Split-K in the fused MoE kernel
#
# A product with few rows and a long K loop gives few programs, and most of the GPU waits. Split-K gives each K loop to
# several programs and adds up their parts: by atomics as they come, or in a fixed order by a second kernel. On which
# shapes and token counts does it win on this GPU, and is it right and repeatable?
#
# The pull request that brought such a kernel to a serving engine was made after a claim that it is faster on A100 and
# H100 for Mixtral. On an RTX 4090, with Qwen2-57B-A14B in fp8 (w8a8) at tensor parallel 4, it gained nothing. Float16
# was required then, as bf16 atomics were not to be had in Triton, and the output has to start at zero. Here both
# reductions run in bf16 as well.

# %% [markdown]
# The sweep `fused-moe-splitk`: Mixtral-8x7B and Qwen2-57B-A14B, whole and at tensor parallel 4, bf16 and fp8 with one
# scale a matrix; 1, 2, 4 and 8 parts; both reductions; in a CUDA graph, cold L2, uniform routing. `LIVE` runs it here.

# %%
import workbench
from workbench.devices import find_device
from workbench.report.winners import repeatability, verdicts, winners
from workbench.sweeps.loader import recording
from workbench.sweeps.presets import preset

# %%
LIVE = False
sweep = preset("fused-moe-splitk", find_device())
results = workbench.sweep(sweep) if LIVE else recording("h200-splitk")
print(results.totals(), *results.notes, sep="\n")

# %% [markdown]
# ## Winners
# The fastest split of each problem against one part. A tie is where the bands from p10 to p90 overlap.

# %%
found = winners(results.frame(), {"split_k": 1}, among=("split_k", "reduction"))
found.round({"best_us": 1, "baseline_us": 1, "speedup": 2})

# %% [markdown]
# The token counts at which split-K wins, ties and loses:

# %%
verdicts(found)

# %% [markdown]
# ## Right and repeatable
# Each point was checked against float64, then run eight times more on the same inputs: at how many points were all
# results the same bits, how many different ones were there at most, and how large was the worst error over its budget?

# %%
repeatability(results.frame())
