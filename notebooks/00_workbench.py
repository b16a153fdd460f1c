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
# # MoE workbench
#
# How should a Mixture-of-Experts layer be run? Turn modes on and off, read the plan, press **Run**: latency, speed-up
# and correctness draw themselves while the sweep runs in a worker process. Where an axis has several values on, all of
# them are run. What cannot be honoured on this machine is crossed out, with the reason below it.
#
# Without a GPU the recorded sweeps open in the same panel; choose *live* as the source to run on this machine.

# %%
from workbench.widgets import Workbench, is_headless

panel = Workbench("quick") if is_headless() else Workbench()
panel

# %% [markdown]
# Without a screen (`make lab HEADLESS=1`) the same panel runs its sweep to the end here, and leaves its exports in
# `results/`.

# %%
if is_headless():
    print(panel.run_to_end().totals())

# %% [markdown]
# What the panel shows now, frozen: figures, tables, and the code that repeats them stay readable in the saved notebook.
# Run this cell again after a sweep, or press **Freeze**.

# %%
panel.freeze()
