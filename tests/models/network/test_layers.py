"""Norm, rotary embedding and the whole layer: plain formulas, ranks that add up, float32 from stored weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_kernels import Routing
from network_cases import CPU, Whole, config_of, random_tensors

from workbench.errors import InvalidInput
from workbench.models.network.batch import Batch, decode_batch, prefill_batch
from workbench.models.network.build import build_network
from workbench.models.network.config import cut_network
from workbench.models.network.layer import DecoderLayer
from workbench.models.network.moe import MoE
from workbench.models.network.network import Network
from workbench.models.network.norm import RMSNorm
from workbench.models.network.rope import Rope, halves_order, turned
from workbench.models.network.rope_config import RopeConfig
from workbench.runtime.kv_cache import KVCache


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
def test_norm_is_computed_in_float32_and_rounded_once(dtype: torch.dtype, limit: float) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = (
        torch.rand(37, generator=draw).to(dtype),
        torch.randn(5, 3, 74, generator=draw).to(dtype)[..., ::2] * 300,
    )
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    got = RMSNorm(weight, 1e-3)(x)
    assert got.dtype == dtype
    assert relative(got, wanted) < limit  # squares of 900 overflow float16


def test_turned_pairs_against_complex_numbers() -> None:
    """At positions of a million too, where angles in float32 would be off by several hundredths."""
    rope = Rope(RopeConfig(theta=1000.0), 10, CPU)
    positions = torch.tensor([0, 1, 5, 131071, 1_000_003])
    x = torch.randn(5, 3, 10, generator=torch.Generator().manual_seed(1))
    angles = positions.double()[:, None] * 1000.0 ** (-torch.arange(0, 10, 2).double() / 10)
    pairs = (
        torch.complex(x[..., :5].double(), x[..., 5:].double()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    got = turned(x, rope(positions))
    assert relative(got, torch.cat((pairs.real, pairs.imag), -1)) < 1e-6
    assert torch.equal(got[0], x[0])
    assert halves_order(6).tolist() == [0, 2, 4, 1, 3, 5]


def built(case: str, **options: Any) -> Network:
    config = config_of(case)
    return build_network(config, random_tensors(config), **{"quant": "fp32", "moe_backend": "reference", **options})


def prefilled(network: Network, lengths: tuple[int, ...] = (7, 3)) -> tuple[Batch, KVCache]:
    cache = KVCache.for_network(network, len(lengths), max(lengths) + 2, 3)
    draw = torch.Generator().manual_seed(2)
    return prefill_batch([torch.randint(0, 100, (n,), generator=draw) for n in lengths], cache), cache


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "ranks", "changes"),
    [
        ("llama", 2, {"vocab_size": 100, "intermediate_size": 78}),
        # Two key heads: three ranks share each.
        ("qwen3_moe", 6, {"vocab_size": 102, "intermediate_size": 24, "moe_intermediate_size": 12}),
        ("deepseek_v2-groups", 2, {"vocab_size": 100, "intermediate_size": 46, "moe_intermediate_size": 20}),
    ],
)
def test_outputs_of_ranks_add_up_to_the_whole(case: str, ranks: int, changes: dict[str, Any]) -> None:
    config = config_of(case, **changes)
    source = Whole(config)
    cut = cut_network(config, tp_size=ranks)
    whole = build_network(config, source, quant="fp32", moe_backend="reference")
    parts = [build_network(cut, source, quant="fp32", moe_backend="reference", rank=rank) for rank in range(ranks)]
    assert parts[0].lm_head.weight.shape == (config.vocab_size // ranks, config.hidden_size)
    batch, cache = prefilled(whole)
    x = torch.randn(10, config.hidden_size, generator=torch.Generator().manual_seed(3))
    turn = whole.rope(batch.positions_S)
    for index, layer in enumerate(whole.layers):
        attended = [part.layers[index].attention(x, batch, prefilled(part)[1].layers[index], turn) for part in parts]
        assert relative(sum(attended), layer.attention(x, batch, cache.layers[index], turn)) < 1e-5
        assert relative(sum(part.layers[index].mlp(x) for part in parts), layer.mlp(x)) < 1e-5


@torch.no_grad()
def test_one_rank_runs_alone_and_takes_any_token() -> None:
    config = cut_network(config_of("llama", vocab_size=100, intermediate_size=78), tp_size=2)
    network = build_network(config, random_tensors(config), quant="fp32", moe_backend="reference")
    batch, cache = prefilled(network)
    assert network(batch, cache).shape == (2, 50)
    with pytest.raises(InvalidInput, match="rank: must be 0"):
        build_network(config, random_tensors(config), rank=1)
    with pytest.raises(InvalidInput, match="rank: must be from 0 to 1, not 2"):
        build_network(config, random_tensors(config), rank=2)


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("quant", ["fp8_block", "int4", "bf16"])
def test_an_upcast_layer_is_float32_of_what_is_stored(case: str, quant: str) -> None:
    """Against a float32 network that was given the dequantised matrices as its weights."""
    network = built(case, quant=quant)
    assert network.dtype == torch.bfloat16
    batch, cache = prefilled(network)
    oracle = built(case)
    wide = KVCache(network.config, 2, 9, 3, torch.float32, CPU)
    for layer in oracle.layers:
        replace_weights(layer, network.layers[layer.index])
    x = torch.randn(10, network.config.hidden_size, generator=torch.Generator().manual_seed(4))
    for index, layer in enumerate(network.layers):
        exact = layer.upcast()
        got = exact(x, batch, cache.layers[index].upcast())
        assert got.dtype == torch.float32
        assert relative(got, oracle.layers[index](x, batch, wide.layers[index])) < 1e-5
        near = layer(x.to(torch.bfloat16), batch, cache.layers[index])
        assert near.dtype == torch.bfloat16
        assert relative(near, got) < 0.05
    steps = decode_batch(torch.tensor([3, 4]), cache, [7, 3])
    assert network.layers[1].upcast()(x[:2], steps, cache.layers[1].upcast()).isfinite().all()


def replace_weights(mine: DecoderLayer, theirs: DecoderLayer) -> None:
    """Give a float32 layer the values that another one stores."""
    from moe_kernels import ExpertWeights, LinearWeights

    from workbench.models.network.linear import Linear
    from workbench.models.network.moe import Gate

    others = dict(theirs.named_modules())
    for name, module in mine.named_modules():
        other = others[name]
        if isinstance(module, Linear):
            module.weights = LinearWeights.from_dense(other.weights.dequantize(), "fp32")
            module.bias = None if other.bias is None else other.bias.float()
        elif isinstance(module, RMSNorm):
            module.weight = other.weight.float()
        elif isinstance(module, Gate):
            module.weight, module.bias = other.weight, other.bias
        elif isinstance(module, MoE):
            module.experts = ExpertWeights.from_dense(*other.experts.dequantize(), "fp32")
            module.shared_gate = other.shared_gate
    attention = mine.attention
    if hasattr(attention, "kv_up"):
        attention.w_uk_HNC, attention.w_uv_HVC = attention._per_head()


@torch.no_grad()
def test_a_forced_routing_is_used_and_the_gates_own_can_be_kept() -> None:
    network = built("mixtral")
    moe = network.layers[0].mlp
    assert isinstance(moe, MoE)
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(5))
    free = moe(x)
    assert moe.last_routing is None
    moe.keep_routing = True
    moe(x)
    own = moe.last_routing
    assert own is not None
    assert torch.equal(own.topk_ids, moe.gate(x).topk_ids)
    moe.forced = Routing(own.topk_weights * 2, own.topk_ids)
    torch.testing.assert_close(moe(x), 2 * free, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moe.upcast()(x), 2 * free, rtol=1e-5, atol=1e-6)
    moe.forced = Routing(own.topk_weights, torch.full_like(own.topk_ids, -1))
    assert int(moe(x).count_nonzero()) == 0


def test_parts_are_named_and_weights_counted_once() -> None:
    network = built("deepseek_v3")
    parts = {str(module.part) for module in network.modules() if hasattr(module, "part")}
    assert parts == {"embed", "layer", "norm", "attention", "mlp", "moe", "gate", "lm_head", "rope"}
    # Plain weights: what absorbed attention reads of kv_b_proj is a view.
    assert network.weight_bytes == 4 * network.config.parameters()
    assert built("llama").weight_bytes == 4 * config_of("llama").parameters()  # tied: one matrix
    quantised = built("deepseek_v3", quant="fp8_channel")
    absorbed = sum(w.nbytes for layer in quantised.layers for w in layer.attention.tensors())
    assert absorbed == 3 * 4 * (12 + 10) * 32 * 2


def test_progress_and_unknown_forms() -> None:
    seen: list[tuple[int, int]] = []
    built("qwen3_moe", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    with pytest.raises(InvalidInput, match="mla_prefill: must be absorbed or expanded, not 'both'"):
        built("deepseek_v2", mla_prefill="both")
    with pytest.raises(InvalidInput, match="quant: must be fp32"):
        built("llama", quant="fp5")
