"""How much memory a step takes, from its configuration alone. No torch here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

from moe_kernels.formats import FORMATS, expert_bytes, matrix_bytes
from moe_kernels.names import Quant

from workbench.arithmetic import activation_bytes
from workbench.models.network.names import EMBED, LM_HEAD, rank_tensors
from workbench.models.network.shapes import NetworkConfig
from workbench.parts import Modes, StepPoint

GIB = 2**30
# Numbers that a source of random experts makes at once: enough to keep a GPU busy, and little beside a layer.
_STACK = 2**27


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of a step on one rank.

    Attributes:
        weight_bytes: of all weights as they are stored, exact.
        kv_cache_bytes: of all pages, exact.
        work_bytes: of what is held beside them while loading or running, whichever is more: an estimate.
    """

    weight_bytes: int
    kv_cache_bytes: int
    work_bytes: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.weight_bytes + self.kv_cache_bytes + self.work_bytes

    def sentence(self, name: str, free: int | None, device: str) -> str:
        """`deepseek-v2-lite needs 33.0 GiB (29.3 of weights, ...), and 139.2 GiB is free on NVIDIA H200`."""
        parts = (
            f"{self.weight_bytes / GIB:.2f} of weights, {self.kv_cache_bytes / GIB:.2f} of cache and "
            f"{self.work_bytes / GIB:.2f} to work in"
        )
        there = "" if free is None else f", and {free / GIB:.2f} GiB is free on {device}"
        return f"{name} needs {self.total / GIB:.2f} GiB ({parts}){there}"


def spec_memory(config: NetworkConfig, modes: Modes, point: StepPoint) -> StepMemory:
    """What a spec's step takes; `step_memory` with the spec's own values."""
    return step_memory(
        config,
        modes.quant,
        point.batch_size,
        point.max_len,
        input_len=point.input_len,
        page_size=point.page_size,
        group_size=modes.group_size,
        zero_points=modes.zero_points,
        mla_prefill=modes.mla_prefill,
        mla_decode=modes.mla_decode,
    )


def step_memory(
    config: NetworkConfig,
    quant: str,
    batch_size: int = 1,
    max_len: int = 128,
    *,
    input_len: int | None = None,
    page_size: int = 16,
    group_size: int = 128,
    zero_points: bool = False,
    mla_prefill: str = "expanded",
    mla_decode: str = "absorbed",
) -> StepMemory:
    """What a network takes on one rank.

    Args:
        config: the network.
        quant, group_size, zero_points: format of its weights; the last two of int4.
        batch_size: sequences in the cache.
        max_len: tokens of each that the cache has room for.
        input_len: tokens of each that are prefilled at once; None for `max_len`.
        page_size: tokens of a page.
        mla_prefill, mla_decode: form of latent attention; not read without it.
    """
    scheme, size = Quant(quant), activation_bytes(Quant(quant))
    absorbed = "absorbed" in (mla_prefill, mla_decode)
    weights = _weight_bytes(config, scheme, size, absorbed, group_size=group_size, zero_points=zero_points)
    pages = batch_size * -(-max_len // page_size)
    cache = pages * page_size * config.kv_bytes_per_token(size, mla_decode)
    work = max(
        _loading_bytes(config, scheme), _running_bytes(config, batch_size * (input_len or max_len), batch_size, size)
    )
    return StepMemory(weight_bytes=weights, kv_cache_bytes=cache, work_bytes=work)


def _weight_bytes(
    config: NetworkConfig, quant: Quant, size: int, absorbed: bool, *, group_size: int, zero_points: bool
) -> int:
    """Bytes as `build_network` stores them: matrices that read the same input are one."""
    hidden, moe, mla = config.hidden_size, config.moe, config.mla

    def matrix(rows: int, columns: int) -> int:
        return matrix_bytes(quant, rows, columns, group_size=group_size, zero_points=zero_points)

    def mlp(channels: int) -> int:
        return matrix(2 * channels, hidden) + matrix(hidden, channels)

    heads = config.rank_heads
    if mla is None:
        attention = matrix((heads + 2 * config.rank_kv_heads) * config.head_dim, hidden)
        attention += matrix(hidden, heads * config.head_dim)
    else:
        expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        queries = heads * mla.qk_head_dim
        first = queries if mla.q_lora_rank is None else mla.q_lora_rank
        attention = matrix(first + mla.latent_dim, hidden) + matrix(expanded, mla.kv_lora_rank)
        attention += matrix(hidden, heads * mla.v_head_dim)
        if mla.q_lora_rank is not None:
            attention += matrix(queries, mla.q_lora_rank)
        if absorbed and FORMATS[quant].quantized:  # kept dequantised too, to multiply by one head at a time
            attention += expanded * mla.kv_lora_rank * size
    total = config.num_layers * attention
    total += (config.num_layers - config.moe_layers) * mlp(config.rank_intermediate)
    if moe is not None:
        one = expert_bytes(
            quant,
            hidden,
            moe.intermediate_size // config.tp_size,
            group_size=group_size,
            zero_points=zero_points,
        )
        sparse = moe.num_experts * (one + 4 * hidden)  # the gate is float32
        sparse += 4 * moe.num_experts if moe.gate.correction_bias else 0
        if moe.shared_intermediate_size:
            sparse += mlp(config.rank_shared) + (4 * hidden if moe.shared_gate else 0)
        total += config.moe_layers * sparse
    return total + size * _plain_numbers(config)


def _plain_numbers(config: NetworkConfig) -> int:
    """Numbers that stay in the compute dtype: embedding, output, norms and biases of projections."""
    found = 0
    for name, shape in rank_tensors(config).items():
        if name in (EMBED, LM_HEAD) or name.endswith(("norm.weight", "_proj.bias", "_with_mqa.bias")):
            found += prod(shape)
    return found


def _loading_bytes(config: NetworkConfig, quant: Quant) -> int:
    """The largest tensor as it is read and in float32, and where it is quantised, its scaled copy too.

    Or as much as that of one expert, beside a stack of random ones and the stack before it.
    """
    each = 12 if FORMATS[quant].quantized else 6
    largest = max(map(prod, rank_tensors(config).values())) * config.tp_size * each
    if config.moe is None:
        return largest
    one = _expert_numbers(config)
    return max(largest, one * (each + 2 * 2 * stacked_experts(config)))


def stacked_experts(config: NetworkConfig) -> int:
    """How many routed experts a source of random ones makes at once."""
    assert config.moe is not None
    return min(config.moe.num_experts, max(1, _STACK // _expert_numbers(config)))


def _expert_numbers(config: NetworkConfig) -> int:
    assert config.moe is not None
    return 3 * config.hidden_size * (config.moe.intermediate_size // config.tp_size)


def _running_bytes(config: NetworkConfig, rows: int, batch_size: int, size: int) -> int:
    """The widest moment of a prefill of `rows` tokens: what a row holds in attention, or in an MLP or its experts."""
    hidden, heads, moe = config.hidden_size, config.rank_heads, config.moe
    residual = 4 * hidden * size
    queries = heads * config.head_dim
    kept = (heads if config.mla is not None else config.rank_kv_heads) * (config.head_dim + config.value_dim)
    # Turned queries and keys pass through float32.
    attention = (2 * queries + 2 * kept + heads * config.value_dim) * size + 2 * 4 * (queries + kept)
    channels = [config.rank_intermediate] if config.moe_layers < config.num_layers else []
    mlp = 3 * max(channels, default=0) * size
    if moe is not None:
        routed = moe.top_k * (3 * moe.intermediate_size // config.tp_size + hidden) * size
        mlp = max(mlp, routed + 3 * config.rank_shared * size + 8 * moe.num_experts)
    return rows * (residual + max(attention, mlp)) + 2 * 4 * batch_size * config.rank_vocab


def free_host_bytes() -> int | None:
    """Memory that this machine, or the control group of this process, still gives; None where it does not say."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    if not found and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(found, default=None)
