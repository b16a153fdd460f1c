"""Time the Triton layer beside SGLang's fused MoE on one GPU: the same weights and routings, samples interleaved.

    python tests/peers/beside_sglang.py OUT.jsonl [--tokens 1,8,...] [--shapes mixtral-8x7b,...] [--groups bf16,fp8]

Group bf16: SGLang and ours. Group fp8: SGLang and ours in fp8_block on the same stored weights; ours in nvfp4 and mxfp4
up to 128 tokens; DeepGEMM as a whole layer from 1024 tokens on, where it is installed. Routing in and sum
out, quantising of activations included, each call in its own CUDA graph, L2 emptied by reading before every sample,
medians. Needs an NVIDIA GPU and an installed SGLang. `workbench/recorded/h200-beside-sglang-*.jsonl` was measured so.
One line a variant of a cell: its median in microseconds, its ratio to SGLang's, its share of the floor (its distinct
experts' bytes over 4.35 TB/s, or operations over 786 or, for fp8, 1431 TFLOP/s: rates measured on that H200), and how
far its output lies from that of ours on the unquantised weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from moe_kernels import ExpertWeights, Routing, fused_experts
from moe_kernels.formats import expert_bytes

SHAPES = {  # experts, hidden size, channels of an expert, experts a token
    "deepseek-v2-lite": (64, 2048, 1408, 6),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "qwen2-57b-a14b": (64, 3584, 2560, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
}
READ, OPERATIONS = 4.35e12, {"bf16": 786e12, "fp8_block": 1431e12, "nvfp4": 786e12, "mxfp4": 786e12}
ROUNDS = 5
Layer = Callable[..., torch.Tensor]


def peer(stored: ExpertWeights, top_k: int) -> Layer:
    """SGLang's fused experts on these weights, as `function(x, topk_weights, topk_ids, router_logits)`."""
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts as sglang_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    experts, hidden, channels = stored.w2.shape
    config = MoeRunnerConfig(
        num_experts=experts,
        num_local_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=channels,
        top_k=top_k,
        inplace=False,
        activation="silu",
    )
    options = {}
    if stored.w1_scale is not None:
        options = {
            "use_fp8_w8a8": True,
            "w1_scale": stored.w1_scale.view(experts, -1, stored.w1_scale.shape[-1]),
            "w2_scale": stored.w2_scale,
            "block_shape": [128, 128],
        }
    return lambda x, *route: sglang_experts(x, stored.w1, stored.w2, StandardTopKOutput(*route), config, **options)


def ours(stored: ExpertWeights) -> Layer:
    """Our Triton layer in the same form."""
    return lambda x, weights, ids, _: fused_experts(x, stored, Routing(weights, ids), impl="triton")


def deep_gemm(stored: ExpertWeights) -> Layer | None:
    """DeepGEMM's grouped GEMMs as a layer; None where it is not installed."""
    try:
        import deep_gemm as _  # noqa: F401
    except ImportError:
        return None
    from workbench.peers.deep_gemm import deep_gemm_experts

    return lambda x, weights, ids, _: deep_gemm_experts(x, stored, Routing(weights, ids))


def capture(call: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
    """Warm up, then record one call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def cell(functions: dict[str, Layer], plain: Layer, shape: tuple[int, ...], tokens: int) -> list[dict[str, object]]:
    """One shape at one token count: a row for each of `functions`, by format and implementation, `bf16 ours`."""
    experts, hidden, channels, top_k = shape
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    routes = []
    for _ in range(8 if tokens <= 1024 else 3):
        logits = torch.randn(tokens, experts, device="cuda")
        weights, ids = torch.topk(torch.softmax(logits, -1), top_k, dim=-1)
        routes.append((weights, ids.int(), logits))
    distinct = statistics.mean(route[1].unique().numel() for route in routes)
    want = plain(x, *routes[0]).double()
    apart = {name: float((f(x, *routes[0]).double() - want).norm() / want.norm()) for name, f in functions.items()}
    graphs = {n: [capture(lambda f=f, r=r: f(x, *r)) for r in routes] for n, f in functions.items()}
    flush = torch.ones(60 * 2**20, device="cuda", dtype=torch.int32)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(ROUNDS * len(routes)):
        for name in list(functions) if turn % 2 else list(functions)[::-1]:
            flush.sum()
            torch.cuda._sleep(20_000)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name][turn % len(routes)].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
    operations = 6 * tokens * top_k * hidden * channels
    rows = []
    base = next((statistics.median(times[name]) for name in times if name.endswith("sglang")), None)
    for name, taken in times.items():
        quant, variant = name.split()
        moved = distinct * expert_bytes(quant, hidden, channels) + tokens * hidden * 4
        floor = max(moved / READ, operations / OPERATIONS[quant]) * 1e6
        median = statistics.median(taken)
        rows.append(
            {
                "M": tokens,
                "quant": quant,
                "variant": variant,
                "us": round(median, 2),
                "to_sglang": None if base is None else round(median / base, 3),
                "floor": round(100 * floor / median, 1),
                "tflops": round(operations / median / 1e6, 1),
                "distinct": distinct,
                "apart": apart[name],
            }
        )
    return rows


def group_functions(
    group: str, dense: ExpertWeights, w1: torch.Tensor, w2: torch.Tensor, top_k: int
) -> dict[str, Layer]:
    """The variants of a group by name."""
    if group == "bf16":
        return {"bf16 sglang": peer(dense, top_k), "bf16 ours": ours(dense)}
    blocks = ExpertWeights.from_dense(w1, w2, "fp8_block")
    functions = {"fp8_block sglang": peer(blocks, top_k), "fp8_block ours": ours(blocks)}
    for quant in ("nvfp4", "mxfp4"):
        functions[f"{quant} ours"] = ours(ExpertWeights.from_dense(w1, w2, quant))
    layer = deep_gemm(blocks)
    return functions if layer is None else {**functions, "fp8_block deep_gemm": layer}


def chosen(name: str, tokens: int) -> bool:
    """Whether a variant has a place at this token count."""
    return tokens >= 1024 if name.endswith("deep_gemm") else tokens <= 128 or not name.startswith(("nvfp4", "mxfp4"))


def main() -> None:
    """Run every cell and append its lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="1,8,32,128,1024,4096")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--groups", default="bf16,fp8")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after these")
    given = parser.parse_args()
    begun = time.perf_counter()
    with given.out.open("a", encoding="utf-8") as file:
        for name in given.shapes.split(","):
            experts, hidden, channels, top_k = SHAPES[name]
            torch.manual_seed(0)
            w1 = torch.empty(experts, 2 * channels, hidden, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
            w2 = torch.empty(experts, hidden, channels, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
            dense = ExpertWeights.from_dense(w1, w2)
            for group in given.groups.split(","):
                functions = group_functions(group, dense, w1, w2, top_k)
                for tokens in map(int, given.tokens.split(",")):
                    if time.perf_counter() - begun > given.seconds:
                        return
                    some = {key: function for key, function in functions.items() if chosen(key, tokens)}
                    for row in cell(some, ours(dense), SHAPES[name], tokens):
                        print(json.dumps({"shape": name, **row}), flush=True)
                        file.write(json.dumps({"shape": name, **row}) + "\n")
                    file.flush()
                del functions
            del dense, w1, w2
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
