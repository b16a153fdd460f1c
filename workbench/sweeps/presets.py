"""Named sweeps. Each is a function of the device: the same name gives what that device can show."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from workbench.devices import DeviceInfo
from workbench.errors import InvalidInput, choices
from workbench.modes import Subject
from workbench.spec import Modes, RunSpec, StepPoint
from workbench.sweeps.spec import SweepSpec

SHAPES = ("mixtral-8x7b", "qwen2-57b-a14b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3")
ROUTINGS = ("model", "balanced", "uniform", "zipf", "single_expert")
GPU_BACKENDS = ("reference", "torch_grouped_mm", "triton")
GPU_COMPILE = ("none", "default", "max-autotune-no-cudagraphs", "reduce-overhead")


def _main(device: DeviceInfo) -> SweepSpec:
    """The main job: on a CPU a trained model's layer, on a GPU also the kernels, modes and shapes that need one."""
    if device.type == "cpu":
        return SweepSpec(
            name="main",
            axes={
                "top_k": (8, 2),
                "quant": ("fp32", "bf16", "fp16"),
                "moe_backend": ("reference", "torch_grouped_mm"),
                "compile": ("none", "default"),
                "num_tokens": (1, 16, 128, 1024),
            },
            base=RunSpec(model="smollm2-135m", device="cpu", samples=4, modes=Modes(dynamic=True, routing="model")),
        )
    return SweepSpec(
        name="main",
        axes={
            "model": ("smollm2-135m", *SHAPES),
            "quant": ("fp32", "bf16", "fp16"),
            "routing": ROUTINGS,
            "moe_backend": GPU_BACKENDS,
            "compile": GPU_COMPILE,
            "graph": ("disabled", "full"),
            "num_tokens": (1, 16, 128, 1024),
        },
        base=RunSpec(device=device.torch_device, modes=Modes(dynamic=True)),
    )


def _quick(device: DeviceInfo) -> SweepSpec:
    """A few points in a few seconds."""
    return SweepSpec(
        name="quick",
        axes={
            "quant": ("fp32", "bf16"),
            "moe_backend": ("reference", "torch_grouped_mm"),
            "num_tokens": (1, 16, 128),
        },
        base=RunSpec(
            model="smollm2-135m", top_k=2, device=device.torch_device, samples=5, modes=Modes(routing="model")
        ),
    )


def _shapes(device: DeviceInfo) -> SweepSpec:
    """One MoE layer of five models in bf16, over kernels, compile modes and graphs."""
    return SweepSpec(
        name="shapes",
        axes={
            "model": SHAPES,
            "moe_backend": GPU_BACKENDS,
            "compile": GPU_COMPILE,
            "graph": ("disabled", "full"),
            "num_tokens": (1, 8, 32, 128, 1024, 4096),
        },
        base=RunSpec(device=device.torch_device),
    )


def _splitk(device: DeviceInfo) -> SweepSpec:
    """Whether splitting the K loop pays, on which shapes and token counts, and whether it repeats itself.

    Atomic reduction of one part is left out by the plan: there is nothing to add up.
    """
    return SweepSpec(
        name="fused-moe-splitk",
        axes={
            "model": ("mixtral-8x7b", "qwen2-57b-a14b"),
            "tp_size": (1, 4),
            "quant": ("bf16", "fp8_tensor"),
            "split_k": (1, 2, 4, 8),
            "reduction": ("deterministic", "atomic"),
            "num_tokens": (1, 2, 4, 8, 16, 32, 64, 128, 256),
        },
        base=RunSpec(
            device=device.torch_device, samples=40, modes=Modes(moe_backend="triton", graph="full", routing="uniform")
        ),
    )


def _steps(device: DeviceInfo) -> SweepSpec:
    """Whole models, eager: the prefill and the decode steps of the experiments on compile and on attention in graphs.

    Decode with latent attention expanded is left out by the plan for the model that has none. On a CPU a small trained
    model.
    """
    if device.type == "cpu":
        return SweepSpec(
            name="steps",
            axes={"attention_backend": ("reference", "sdpa"), "batch_size": (1, 8)},
            base=RunSpec(
                subject=Subject.STEP, model="smollm2-135m", device="cpu", samples=3, modes=Modes(quant="fp32")
            ),
        )
    return SweepSpec(
        name="steps",
        axes={
            "model": ("llama-3-8b", "deepseek-v2-lite"),
            "attention_backend": ("sdpa", "triton"),
            "mla_decode": ("absorbed", "expanded"),
            "batch_size": (1, 8, 32),
        },
        base=RunSpec(
            subject=Subject.STEP,
            device=device.torch_device,
            samples=10,
            modes=Modes(moe_backend="triton"),
            point=StepPoint(input_len=128, output_len=8),
        ),
    )


def _compile(device: DeviceInfo) -> SweepSpec:
    """What compiling a decode step gains, with its MoE layers left out and let in, unfused and fused.

    What of a step is compiled where nothing is, is left out by the plan. On a CPU a small model cut into experts.
    """
    axes = {"compile": ("none", "default"), "compile_scope": ("skip_moe", "all")}
    if device.type == "cpu":
        return SweepSpec(
            name="moe-torch-compile",
            axes=axes | {"batch_size": (1,)},
            base=RunSpec(
                subject=Subject.STEP,
                model="smollm2-135m",
                experts=4,
                num_layers=2,
                device="cpu",
                samples=5,
                modes=Modes(quant="fp32"),
                point=StepPoint(input_len=128, output_len=8),
            ),
        )
    return SweepSpec(
        name="moe-torch-compile",
        axes={"quant": ("bf16", "fp8_block"), "fusion": ("off", "on"), **axes, "batch_size": (1, 8, 32)},
        base=RunSpec(
            subject=Subject.STEP,
            model="deepseek-v2-lite",
            device=device.torch_device,
            samples=20,
            timeout_s=900,
            modes=Modes(moe_backend="triton", attention_backend="triton", graph="full"),
            point=StepPoint(input_len=128, output_len=8),
        ),
    )


def _graph_attention(device: DeviceInfo) -> SweepSpec:
    """What a CUDA graph around the decode step gains, by model, attention and batch.

    Left out by the plan: latent attention expanded where a model has none, and attention that no graph can hold.
    """
    graphs, lengths = ("disabled", "full"), StepPoint(input_len=128, output_len=8)
    if device.type == "cpu":
        return SweepSpec(
            name="cuda-graph-attention",
            axes={"attention_backend": ("reference", "sdpa"), "graph": graphs, "batch_size": (1, 8)},
            base=RunSpec(
                subject=Subject.STEP,
                model="smollm2-135m",
                num_layers=4,
                device="cpu",
                samples=3,
                modes=Modes(quant="fp32"),
                point=lengths,
            ),
        )
    backends = ("triton", "flashinfer") if find_spec("flashinfer") is not None else ("triton",)
    return SweepSpec(
        name="cuda-graph-attention",
        axes={
            "model": ("llama-3-8b", "deepseek-coder-v2-lite"),
            "attention_backend": backends,
            "mla_decode": ("absorbed", "expanded"),
            "graph": graphs,
            "batch_size": (1, 8, 32),
        },
        base=RunSpec(
            subject=Subject.STEP,
            device=device.torch_device,
            samples=20,
            modes=Modes(moe_backend="triton"),
            point=lengths,
        ),
    )


PRESETS: dict[str, Callable[[DeviceInfo], SweepSpec]] = {
    "main": _main,
    "quick": _quick,
    "shapes": _shapes,
    "fused-moe-splitk": _splitk,
    "steps": _steps,
    "moe-torch-compile": _compile,
    "cuda-graph-attention": _graph_attention,
}


def preset(name: str, device: DeviceInfo) -> SweepSpec:
    """The preset sweep of that name for `device`. Raises `InvalidInput` that lists the names."""
    if name not in PRESETS:
        raise InvalidInput(f"preset: must be {choices(PRESETS)}, not {name!r}")
    return PRESETS[name](device)
