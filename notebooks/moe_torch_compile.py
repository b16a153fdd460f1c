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
# # torch.compile over the MoE layer
#
# A decode step of one sequence is hundreds of small kernels, and `torch.compile` merges those between the products.
# A fused MoE kernel stands in its way. Is it better to leave the MoE layers out of the compiled region, or to let them
# in, and what does compiling cost?
#
# The pull request that let them in measured DeepSeek-V2-Lite at batch 1, input 128, output 8, in a CUDA graph, on a GPU
# that it does not name:
#
# | mode | decode median | decode tokens/s | total latency | total tokens/s |
# |---|---:|---:|---:|---:|
# | no compile | 9.21 ms | 108.61 | 0.101 s | 1352.80 |
# | compile, MoE left out | 7.35 ms | 136.13 | 0.086 s | 1574.70 |
# | compile, MoE too | 6.82 ms | 146.71 | 0.083 s | 1632.26 |
#
# With fp8 weights its capture died in the compiler, on a scalar read of a float8 tensor. Here fp8 is one of the axes.

# %% [markdown]
# The sweep `moe-torch-compile`: that model in bf16 and in fp8 with one scale a block of weights; batch 1, 8 and 32;
# small kernels as they are, and fused by hand; not compiled, compiled without its MoE layers, and compiled whole; all
# in a CUDA graph. `LIVE` runs it here.

# %%
import workbench
from workbench.devices import find_device
from workbench.report.claims import beside
from workbench.report.winners import lesson, verdicts, winners
from workbench.sweeps.loader import recording
from workbench.sweeps.presets import preset

# %%
LIVE = False
sweep = preset("moe-torch-compile", find_device())
results = workbench.sweep(sweep) if LIVE else recording("h200-moe-torch-compile")
frame = results.frame()
print(results.totals(), *results.notes, sep="\n")

# %% [markdown]
# ## Beside the claim
# Median of a decode step at batch 1. Compare the gains: the milliseconds are those of two GPUs.

# %%
beside("moe-torch-compile", frame).round(2)

# %% [markdown]
# ## Winners
# The faster of the two ways of compiling, against none. A tie is where the bands from p10 to p90 overlap.

# %%
modes, places = ("compile", "compile_scope"), ("quant", "fusion", "batch_size")
found = winners(frame, {"compile": "none"}, among=modes, problem=places)
found.round({"best_us": 1, "baseline_us": 1, "speedup": 2})

# %%
verdicts(found, by=("quant", "fusion"))

# %% [markdown]
# Is it the MoE layers that matter? Compiled whole against compiled without them:

# %%
compiled = frame[frame["compile"] != "none"]
scope = winners(compiled, {"compile_scope": "skip_moe"}, among=modes, problem=places)
scope.round({"best_us": 1, "baseline_us": 1, "speedup": 2})

# %% [markdown]
# And how much of it do kernels fused by hand give without a compiler?

# %%
plain = frame[frame["compile"] == "none"]
fused = winners(plain, {"fusion": "off"}, among=("fusion",), problem=("quant", "batch_size"))
fused.round({"best_us": 1, "baseline_us": 1, "speedup": 2})

# %% [markdown]
# ## What compiling costs
# Seconds to compile and to capture the one batch size, the state in which the compile caches were, and what the
# compiler did.

# %%
costs = ["compile_s", "compile_cache", "capture_s", "graphs_compiled", "graph_breaks", "recompiles", "kernels_compiled"]
compiled[[*places, "compile_scope", *costs]].round(1)

# %% [markdown]
# ## Right
# The largest error over its budget, the most that a mode changed an eager step beside what it may, and the smallest
# share of positions with the same most likely token as in float32.

# %%
done = frame[frame["latency_us"].notna()]
right = {"error_ratio": "max", "mode_error": "max", "mode_budget": "min", "top1_agreement": "min"}
done.groupby(["quant", "fusion", *modes]).agg(right)

# %% [markdown]
# ## What was learned

# %%
print(lesson(found, "Compiling"))
print(lesson(scope, "Compiling the MoE layers too"))
print(lesson(fused, "Fusing by hand"))
