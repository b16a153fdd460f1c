"""What a whole step cannot run, and why; a part of `find_reasons`. No torch here."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from moe_kernels.attention.registry import find_attention_backend
from moe_kernels.attention.rules import AttentionKind, builtin_attention_reasons
from moe_kernels.step.rules import step_reasons as fused_reasons

from workbench.arithmetic import compute_dtype
from workbench.devices import DeviceInfo
from workbench.errors import choices
from workbench.models.network.choose import choose_network
from workbench.models.network.memory import GIB, StepMemory, spec_memory
from workbench.models.network.shapes import NetworkConfig
from workbench.models.shapes import router_reason
from workbench.modes import (
    ATTENTION_BACKENDS,
    L2,
    ActivationScale,
    Compile,
    CompileScope,
    Fusion,
    Graph,
    Mla,
    RoutingKind,
)
from workbench.parts import MAX_BATCH, Modes, StepPoint
from workbench.spec import RunSpec
from workbench.support import Reason, backend_reasons, compiler_reasons, ended, graph_reasons, meaningless

_PLAIN = Modes()
_MEMORY_MODES = ("quant", "group_size", "zero_points", "mla_prefill", "mla_decode")


def step_network(spec: RunSpec) -> NetworkConfig:
    """The network that a step runs, on one rank; a dense one with `experts` has MoE layers in which all are chosen.

    Raises:
        InvalidInput: the model is unknown or unsupported, `num_layers` is more than it has, `tp_size` or `experts` does
            not divide, or `top_k` is not the network's own.
    """
    return choose_network(spec).config


def step_reasons(spec: RunSpec, device: DeviceInfo) -> list[Reason]:
    """Why the step `spec` cannot run on `device`. Raises what `step_network` does."""
    chosen = choose_network(spec)
    config = chosen.config
    reasons = [*_meaningless(spec, config), *_perplexity(spec, bool(chosen.files.weights))]
    reasons += [*graph_reasons(spec, device), *_graphs_and_compile(spec, config, device)]
    kernels = "attention_backend" if spec.modes.attention_backend == "triton" else ""
    if spec.modes.fusion is Fusion.ON:
        kernels = "fusion"
    moe = config.moe is not None
    own = spec if moe else spec.replace(moe_backend=_PLAIN.moe_backend, split_k=None, reduction=_PLAIN.reduction)
    reasons += compiler_reasons(own, device, kernels=kernels)
    if moe:
        reasons += backend_reasons(spec, config.layer_shape, device, compiled=compiled_part(spec, moe=True))
        if (
            spec.experts is None
            and spec.modes.routing is RoutingKind.MODEL
            and (why := router_reason(config.layer_shape))
        ):
            reasons.append(Reason("routing", ended(f"The model's router cannot be run: {why}")))
    reasons += _attention(spec, config, device)
    return [*reasons, *_memory(spec, config, device)]


def _meaningless(spec: RunSpec, config: NetworkConfig) -> list[Reason]:
    """Fields that say something which has no meaning for a step of this model: refused, so that none is passed over."""
    modes, reasons = spec.modes, meaningless(spec.modes)
    if modes.activation_scale is ActivationScale.STATIC:
        reasons = [reason for reason in reasons if reason.field != "activation_scale"]
        reasons.append(
            Reason(
                "activation_scale",
                "activation_scale static needs a run for calibration, which a step does not have; only dynamic is "
                "allowed.",
            )
        )
    if spec.l2 is L2.HOT:
        reasons.append(
            Reason("l2", "l2 hot is for subject moe_layer; a step finds the cache as the step before left it.")
        )
    if config.mla is None:
        for name in ("mla_prefill", "mla_decode"):
            value, plain = getattr(modes, name), getattr(_PLAIN, name)
            if value is not plain:
                why = f"{name} {value} is for models with latent attention, which {config.name} does not have"
                reasons.append(Reason(name, f"{why}; only {plain} is allowed."))
    if config.moe is None:
        if modes.routing is not RoutingKind.MODEL:
            why = f"routing {modes.routing} is for models with experts, which {config.name} does not have"
            reasons.append(Reason("routing", f"{why}; only model is allowed."))
        known = {reason.field for reason in reasons}
        for name in ("split_k", "reduction"):
            value, plain = getattr(modes, name), getattr(_PLAIN, name)
            if value != plain and name not in known:
                why = f"{name} {value} is for models with experts, which {config.name} does not have"
                reasons.append(Reason(name, f"{why}; only {'none' if plain is None else plain} is allowed."))
    elif spec.experts is not None and modes.routing is not RoutingKind.MODEL:
        reasons.append(
            Reason(
                "routing", "Experts cut from a dense MLP are all chosen; with experts only routing model is allowed."
            )
        )
    return reasons


def compiled_part(spec: RunSpec, *, moe: bool) -> bool:
    """Whether decode steps of this batch run compiled: their MoE layers, or else everything beside them."""
    modes = spec.modes
    if modes.compile is Compile.NONE or spec.step_point.batch_size > (modes.max_compile_batch or MAX_BATCH):
        return False
    return not moe or modes.compile_scope is CompileScope.ALL


def _graphs_and_compile(spec: RunSpec, config: NetworkConfig, device: DeviceInfo) -> list[Reason]:
    """Why decode steps are not compiled, captured or fused as the fields say."""
    modes, reasons = spec.modes, []
    if modes.dynamic:
        reasons.append(
            Reason("dynamic", "dynamic is for subject moe_layer; each batch size of a step is compiled by itself.")
        )
    if modes.compile is Compile.NONE:
        for name, value in (("compile_scope", modes.compile_scope), ("max_compile_batch", modes.max_compile_batch)):
            if value != (plain := getattr(_PLAIN, name)):
                allowed = f"with compile none only {'none' if plain is None else plain} is allowed"
                reasons.append(Reason(name, f"{name} {value} is for compiled steps; {allowed}."))
    if modes.compile_scope is CompileScope.SKIP_MOE and config.moe is None:
        why = f"compile_scope skip_moe is for models with experts, which {config.name} does not have"
        reasons.append(Reason("compile_scope", f"{why}; only all is allowed."))
    if modes.max_capture_batch is not None and modes.graph is not Graph.FULL:
        why = f"max_capture_batch {modes.max_capture_batch} is for graph full"
        reasons.append(Reason("max_capture_batch", f"{why}; with graph {modes.graph} only none is allowed."))
    if modes.fusion is Fusion.ON:
        reasons += [Reason("fusion", f"Fused kernels need Triton: {text}") for text in kernel_reasons(device.type)]
    return reasons


def kernel_reasons(device_type: str) -> list[str]:
    """Why the fused kernels of a step do not run there."""
    return [ended(text) for text in fused_reasons("triton", device_type)]


def _perplexity(spec: RunSpec, trained: bool) -> list[Reason]:
    """Perplexity is of a whole model that was trained."""
    field, reasons = "perplexity_tokens", []
    if spec.step_point.perplexity_tokens is None:
        return []
    if not trained:
        reasons.append(Reason(field, f"Perplexity needs trained weights, and those of {spec.model} are random here."))
    if spec.tp_size > 1:
        reasons.append(
            Reason(field, f"Perplexity needs the whole model, tp_size 1; with tp_size {spec.tp_size} one rank is run.")
        )
    return reasons


def _attention(spec: RunSpec, config: NetworkConfig, device: DeviceInfo) -> list[Reason]:
    name, dtype = spec.modes.attention_backend, compute_dtype(spec.modes.quant).value
    # Decode steps alone are compiled and captured; a prefill runs as it comes.
    graph, compiled = spec.modes.graph is Graph.FULL, compiled_part(spec, moe=False)
    sentences: list[str] = []
    for kind, kv_heads, head_dim, value_dim in _operations(spec, config):
        if name in ATTENTION_BACKENDS:
            sentences += builtin_attention_reasons(
                name,
                kind,
                device.type,
                dtype=dtype,
                head_dim=head_dim,
                v_head_dim=value_dim,
                graph=graph and kind != AttentionKind.PREFILL,
                capability=device.capability,
            )
        elif (registered := find_attention_backend(name)) is not None:
            if kind not in registered.functions:
                sentences.append(f"{name} has no attention of the kind {kind}, which a step of {config.name} needs.")
                continue
            sentences += registered.supports(
                kind=kind,
                device_type=device.type,
                dtype=dtype,
                num_heads=config.rank_heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                v_head_dim=value_dim,
                page_size=spec.step_point.page_size if kind != AttentionKind.PREFILL else None,
                window=config.sliding_window,
                compile=compiled and kind != AttentionKind.PREFILL,
                graph=graph and kind != AttentionKind.PREFILL,
            )
        else:
            allowed = choices([*ATTENTION_BACKENDS, "a registered name"])
            sentences.append(f"attention_backend: must be {allowed}, not {name!r}.")
    return [Reason("attention_backend", ended(text)) for text in dict.fromkeys(sentences)]


def _operations(spec: RunSpec, config: NetworkConfig) -> list[tuple[str, int, int, int]]:
    """The attention of a step's prefill and decode: kind, key heads, head size of keys, of values."""
    mla, modes = config.mla, spec.modes
    plain = (config.rank_kv_heads, config.head_dim, config.value_dim)
    if mla is None:
        return [(AttentionKind.PREFILL, *plain), (AttentionKind.DECODE, *plain)]
    latent = (1, mla.latent_dim, mla.kv_lora_rank)
    absorbed = modes.mla_decode is Mla.ABSORBED
    return [
        (AttentionKind.PREFILL, *(latent if modes.mla_prefill is Mla.ABSORBED else plain)),
        (AttentionKind.MLA_DECODE, *latent) if absorbed else (AttentionKind.DECODE, *plain),
    ]


def _memory(spec: RunSpec, config: NetworkConfig, device: DeviceInfo) -> list[Reason]:
    if device.memory_bytes is None:
        return []
    # Other modes say nothing about memory: without them a panel that tries them all asks once.
    kept = {name: getattr(spec.modes, name) for name in _MEMORY_MODES}
    modes, point = Modes(**kept), spec.step_point
    alone = need = _need(config, modes, point)
    if (most := cache_batch(spec)) > point.batch_size:
        larger = point.model_copy(update={"batch_size": most})
        need = replace(alone, kv_cache_bytes=_need(config, modes, larger).kv_cache_bytes)
    if need.total <= device.memory_bytes:
        return []
    sentence = f"{need.sentence(config.name, None, '')}; {device.name} has {device.memory_bytes / GIB:.2f} GiB."
    if alone.total <= device.memory_bytes:
        return [Reason("max_capture_batch", sentence)]
    return [Reason("batch_size" if need.weight_bytes <= device.memory_bytes else "model", sentence)]


def cache_batch(spec: RunSpec) -> int:
    """Sequences that the KV cache of a step has room for: its batch, and the largest that is captured."""
    modes = spec.modes
    captured = modes.max_capture_batch if modes.graph is Graph.FULL else None
    return max(spec.step_point.batch_size, captured or 1)


@lru_cache(maxsize=256)
def _need(config: NetworkConfig, modes: Modes, point: StepPoint) -> StepMemory:
    return spec_memory(config, modes, point)
