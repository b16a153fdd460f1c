"""A network whose small kernels are fused gives what the plain one gives, in every architecture and phase."""

from __future__ import annotations

import pytest
import torch
from network_cases import CASES, CPU, config_of, random_tensors

from workbench.models.network.batch import decode_batch, prefill_batch
from workbench.models.network.build import build_network, shared_inside
from workbench.models.network.moe import MoE
from workbench.models.network.network import Network
from workbench.runtime.kv_cache import KVCache


def network(case: str, *, fused: bool, quant: str = "fp32", **options: str) -> Network:
    config = config_of(case)
    return build_network(
        config, random_tensors(config), quant=quant, moe_backend="reference", fused=fused, device=CPU, **options
    )


@torch.no_grad()
def logits(made: Network) -> list[torch.Tensor]:
    """Of a prefill of two prompts, the rest of both in a second pass, and three decode steps."""
    cache = KVCache.for_network(made, 2, 16, 3)
    cache.reset()
    ids = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(1))
    found = [made(prefill_batch([ids[0, :5], ids[1, :3]], cache), cache)]
    found.append(made(prefill_batch([ids[0, 5:7], ids[1, 3:7]], cache, start=[5, 3]), cache))
    found += [made(decode_batch(ids[:, at], cache, at), cache) for at in range(7, 10)]
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits(case: str) -> None:
    for got, want in zip(logits(network(case, fused=True)), logits(network(case, fused=False)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
@pytest.mark.parametrize("decode", ["absorbed", "expanded"])
def test_every_form_of_latent_attention(prefill: str, decode: str) -> None:
    if (prefill, decode) == ("absorbed", "expanded"):
        pytest.skip("absorbed prefill has no prefix to read where decode keeps heads")
    forms = {"mla_prefill": prefill, "mla_decode": decode}
    plain, fused = (logits(network("deepseek_v2", fused=fused, **forms)) for fused in (False, True))
    for got, want in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_switching_it_on_and_off_changes_nothing_else() -> None:
    made = network("llama", fused=False)
    before = logits(made)
    made.set_fused(True)
    assert made.layers[0].mlp.fused
    assert made.layers[0].attention.fused
    torch.testing.assert_close(logits(made), before, rtol=1e-4, atol=1e-5)
    made.set_fused(False)
    assert all(torch.equal(got, want) for got, want in zip(logits(made), before, strict=True))


@pytest.mark.parametrize(("case", "inside"), [("deepseek_v2", 2), ("deepseek_v3", 1), ("qwen2_moe", 0), ("mixtral", 0)])
def test_shared_experts_run_among_the_routed_ones(case: str, inside: int) -> None:
    config = config_of(case)
    assert shared_inside(config) == inside
    made = network(case, fused=True)
    moes = [layer.mlp for layer in made.layers if isinstance(layer.mlp, MoE)]
    assert moes
    assert config.moe is not None
    for moe in moes:
        assert moe.experts.num_shared == inside
        assert moe.experts.num_routed == config.moe.num_experts
        assert (moe.shared is None) == (inside > 0 or config.moe.shared_intermediate_size == 0)
    plain = network(case, fused=False)
    assert made.weight_bytes == plain.weight_bytes


@torch.no_grad()
def test_a_layer_is_upcast_whole_with_its_shared_experts() -> None:
    made, plain = network("deepseek_v2", fused=True), network("deepseek_v2", fused=False)
    for at in (0, 1):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(at))
        outs = []
        for one in (made, plain):
            cache = KVCache.for_network(one, 1, 8, 4)
            batch = prefill_batch(torch.zeros(1, 5, dtype=torch.int64), cache)
            outs.append(one.layers[at].upcast()(x, batch, cache.layers[at].upcast()))
        assert isinstance(outs[0], torch.Tensor)
        torch.testing.assert_close(outs[0], outs[1])


def test_bf16_stays_within_its_rounding() -> None:
    plain, fused = (logits(network("llama", fused=fused, quant="bf16")) for fused in (False, True))
    for got, want in zip(fused, plain, strict=True):
        assert (got - want).norm() < 0.02 * want.norm()
