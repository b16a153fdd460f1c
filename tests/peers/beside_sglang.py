"""Time the Triton layer beside SGLang's fused MoE on one GPU: the same weights and routings, samples interleaved.

    python tests/peers/beside_sglang.py OUT.jsonl [--tokens 1,8,32,128,1024,4096] [--shapes mixtral-8x7b,...]

bf16, routing in and sum out, each call in its own CUDA graph, L2 emptied by reading before every sample, medians. Needs
an NVIDIA GPU and an installed SGLang. `workbench/recorded/h200-beside-sglang-0.5.15.jsonl` was measured in this way.
One line a cell: both medians in microseconds, their ratio, each one's share of the floor (distinct experts' bytes over
4.35 TB/s or operations over 786 TFLOP/s, that H200's own measured rates), and how far the two outputs lie apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from moe_kernels import ExpertWeights, Routing, fused_experts

SHAPES = {  # experts, hidden size, channels of an expert, experts a token
    "deepseek-v2-lite": (64, 2048, 1408, 6),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "qwen2-57b-a14b": (64, 3584, 2560, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
}
READ, OPERATIONS = 4.35e12, 786e12
ROUNDS = 7


def peer(w1: torch.Tensor, w2: torch.Tensor, top_k: int) -> Callable[..., torch.Tensor]:
    """SGLang's fused experts on these weights, as `function(x, topk_weights, topk_ids, router_logits)`."""
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts as sglang_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    experts, hidden, channels = w2.shape
    config = MoeRunnerConfig(
        num_experts=experts,
        num_local_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=channels,
        top_k=top_k,
        inplace=False,
        activation="silu",
    )
    return lambda x, *route: sglang_experts(x, w1, w2, StandardTopKOutput(*route), config)


def capture(call: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
    """Warm up, then record one call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def cell(functions: dict[str, Callable[..., torch.Tensor]], shape: tuple[int, ...], tokens: int) -> dict[str, object]:
    """One shape at one token count."""
    experts, hidden, channels, top_k = shape
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    routes = []
    for _ in range(8 if tokens <= 1024 else 3):
        logits = torch.randn(tokens, experts, device="cuda")
        weights, ids = torch.topk(torch.softmax(logits, -1), top_k, dim=-1)
        routes.append((weights, ids.int(), logits))
    distinct = statistics.mean(route[1].unique().numel() for route in routes)
    outputs = {name: function(x, *routes[0]).double() for name, function in functions.items()}
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
    ours, theirs = (statistics.median(times[name]) for name in ("ours", "sglang"))
    operations = 6 * tokens * top_k * hidden * channels
    moved = distinct * 3 * hidden * channels * 2 + tokens * hidden * 4
    floor = max(moved / READ, operations / OPERATIONS) * 1e6
    apart = (outputs["ours"] - outputs["sglang"]).norm() / outputs["sglang"].norm()
    return {
        "M": tokens,
        "ours_us": round(ours, 2),
        "sglang_us": round(theirs, 2),
        "ratio": round(ours / theirs, 3),
        "distinct": distinct,
        "ours_floor": round(100 * floor / ours, 1),
        "sglang_floor": round(100 * floor / theirs, 1),
        "tflops": round(operations / ours / 1e6, 1),
        "diff": apart.item(),
    }


def main() -> None:
    """Run every cell and append its line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="1,8,32,128,1024,4096")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    given = parser.parse_args()
    with given.out.open("a", encoding="utf-8") as file:
        for name in given.shapes.split(","):
            experts, hidden, channels, top_k = SHAPES[name]
            torch.manual_seed(0)
            w1 = torch.empty(experts, 2 * channels, hidden, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
            w2 = torch.empty(experts, hidden, channels, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
            stored = ExpertWeights.from_dense(w1, w2)
            functions = {
                "sglang": peer(w1, w2, top_k),
                "ours": lambda x, tw, ti, _, stored=stored: fused_experts(x, stored, Routing(tw, ti), impl="triton"),
            }
            for tokens in map(int, given.tokens.split(",")):
                row = {"shape": name, **cell(functions, SHAPES[name], tokens)}
                print(json.dumps(row), flush=True)
                file.write(json.dumps(row) + "\n")
                file.flush()
            del functions, stored, w1, w2
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
