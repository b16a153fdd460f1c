"""Public functions of a step: what stands between its matrix products, one launch each.

All of them take float32, bfloat16 and float16, any number of rows (0 too) and any sizes, and rows may have a stride.
Within, all is float32; each says where it rounds, which is where the plain code of a network rounds. They are for
inference; no gradient. Common arguments:

``impl``: ``"reference"`` (plain PyTorch, any device), ``"triton"`` (CUDA), or None: triton on CUDA, else reference.
``pdl``: let the kernel start while the one before it on its stream ends. It changes no value, has no meaning for the
reference and below compute capability 9.0; what comes before must be a kernel, and must not write weights (of norms,
heads and routers), which are read at once.

All raise ValueError for tensors that do not fit together and an unknown ``impl``, and NotImplementedError where that
does not run; the sentence says why.
"""

from __future__ import annotations

from moe_kernels.step.heads import absorb_queries as absorb_queries
from moe_kernels.step.heads import expand_values as expand_values
from moe_kernels.step.router import route as route
from moe_kernels.step.router import router_logits as router_logits
from moe_kernels.step.rows import SumAndNorm as SumAndNorm
from moe_kernels.step.rows import add_rms_norm as add_rms_norm
from moe_kernels.step.rows import silu_mul as silu_mul
from moe_kernels.step.rules import resolve_step_impl as resolve_step_impl
from moe_kernels.step.rules import step_reasons as step_reasons
from moe_kernels.step.turn import LatentTurned as LatentTurned
from moe_kernels.step.turn import Turned as Turned
from moe_kernels.step.turn import latent_turn_and_write as latent_turn_and_write
from moe_kernels.step.turn import turn_and_write as turn_and_write
