"""`find_reasons`: the one authority on what cannot run here, and why. No torch here: notebook kernels call it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from moe_kernels.experts.rules import TRITON_INSTALLED, TRITON_INTERPRETED, builtin_reasons
from moe_kernels.registry import find_backend

from workbench.arithmetic import activation_bytes, compute_dtype, expert_bytes
from workbench.devices import DeviceInfo
from workbench.errors import choices
from workbench.models.shapes import ModelShape, model_shape, router_reason
from workbench.modes import (
    BACKENDS,
    BUILTIN_BACKENDS,
    PEER_BACKENDS,
    ActivationScale,
    Compile,
    Graph,
    Quant,
    Reduction,
    RoutingKind,
    Subject,
)
from workbench.peers.rules import peer_reasons
from workbench.spec import Modes, RunSpec

_GIB = 2**30
_PLAIN = Modes()
TRITON_BACKENDS = ("triton", "triton_fp4")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a spec cannot run: the field to change (its short name) and a sentence for people."""

    field: str
    sentence: str


def find_reasons(spec: RunSpec, device: DeviceInfo) -> list[Reason]:
    """Why `spec` cannot run on `device`; an empty list means that it runs.

    Raises:
        InvalidInput: the spec describes nothing that can be built: an unknown model, `top_k` above the experts, a
            `tp_size` that does not divide.
    """
    if spec.subject is Subject.STEP:
        from workbench.step_support import step_reasons

        return step_reasons(spec, device)
    shape = model_shape(spec)
    reasons = [*meaningless(spec.modes), *graph_reasons(spec, device), *compiler_reasons(spec, device)]
    reasons += backend_reasons(spec, shape, device)
    if spec.modes.routing is RoutingKind.MODEL and (why := router_reason(shape)):
        reasons.append(Reason("routing", ended(f"The model's router cannot be run: {why}")))
    if lacking := memory_sentence(spec, shape, device):
        reasons.append(Reason("num_tokens" if lacking[1] else "model", lacking[0]))
    return reasons


def ended(text: str) -> str:
    """A sentence with its full stop."""
    return text if text.endswith(".") else text + "."


def meaningless(modes: Modes) -> list[Reason]:
    """Fields that say something which has no meaning beside the others: refused, so that none is passed over."""
    reasons = []
    quant = modes.quant
    if quant is not Quant.INT4:
        if modes.group_size != _PLAIN.group_size:
            allowed = f"with quant {quant} only {_PLAIN.group_size} is allowed"
            reasons.append(Reason("group_size", f"group_size {modes.group_size} is for quant int4; {allowed}."))
        if modes.zero_points:
            reasons.append(Reason("zero_points", f"zero_points is for quant int4; with quant {quant} it must be off."))
    if modes.activation_scale is ActivationScale.STATIC and quant is not Quant.FP8_TENSOR:
        reasons.append(
            Reason(
                "activation_scale",
                f"activation_scale static is for quant fp8_tensor; with quant {quant} only dynamic is allowed.",
            )
        )
    atomic = modes.reduction is Reduction.ATOMIC
    if modes.moe_backend != "triton":
        only = f"with moe_backend {modes.moe_backend} only"
        if modes.split_k is not None:
            reasons.append(Reason("split_k", f"split_k is for moe_backend triton; {only} none is allowed."))
        if atomic:
            allowed = f"{only} {_PLAIN.reduction} is allowed"
            reasons.append(Reason("reduction", f"reduction atomic is for moe_backend triton; {allowed}."))
    elif atomic and modes.split_k == 1:
        reasons.append(
            Reason(
                "reduction",
                "reduction atomic adds up the parts of a split K loop, and split_k 1 leaves one part; there only "
                "deterministic is allowed.",
            )
        )
    return reasons


def graph_reasons(spec: RunSpec, device: DeviceInfo) -> list[Reason]:
    """Why CUDA graphs, ours or inductor's, cannot be recorded here, or not both."""
    modes, reasons = spec.modes, []
    if modes.graph is Graph.FULL and device.type != "cuda":
        reasons.append(Reason("graph", "CUDA graphs need a GPU."))
    if modes.compile.owns_graphs and device.type != "cuda":
        reasons.append(
            Reason("compile", f"{modes.compile} records CUDA graphs of inductor's own, and CUDA graphs need a GPU.")
        )
    if modes.compile.owns_graphs and modes.graph is Graph.FULL:
        reasons.append(
            Reason(
                "graph",
                f"{modes.compile} records CUDA graphs of inductor's own, which cannot stand inside a graph of ours; "
                "take max-autotune-no-cudagraphs or default beside graph full.",
            )
        )
    return reasons


def compiler_reasons(spec: RunSpec, device: DeviceInfo, *, kernels: str = "") -> list[Reason]:
    """What torch.compile and triton need here; `kernels` names a field, beside moe_backend, that asks for triton's."""
    modes, reasons = spec.modes, []
    compiled = modes.compile is not Compile.NONE
    field = "compile" if compiled else kernels or ("moe_backend" if modes.moe_backend in TRITON_BACKENDS else "")
    if compiled and device.type == "cpu":
        if not cpp_compiler():
            reasons.append(
                Reason("compile", "torch.compile on a CPU needs a C++ compiler, and neither $CXX nor g++ is here.")
            )
        if not python_headers():
            reasons.append(
                Reason("compile", "torch.compile on a CPU needs Python's headers, and Python.h is not here.")
            )
    if device.type != "cuda" or not field:
        return reasons
    if not TRITON_INSTALLED:
        reasons.append(Reason(field, "triton is not installed, and GPU kernels are compiled by it."))
    elif not TRITON_INTERPRETED and not c_compiler():
        reasons.append(
            Reason(field, "triton needs a C compiler for its launchers, and neither $CC, gcc nor clang is here.")
        )
    return reasons


def cpp_compiler() -> str | None:
    """The C++ compiler that inductor would take; None where there is none."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def c_compiler() -> str | None:
    """The C compiler that triton would take; None where there is none."""
    names = (os.environ.get("CC"), "gcc", "clang", "cc")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def python_headers() -> bool:
    """Whether Python.h is installed."""
    return Path(sysconfig.get_paths()["include"], "Python.h").is_file()


def backend_reasons(
    spec: RunSpec, shape: ModelShape, device: DeviceInfo, *, compiled: bool | None = None
) -> list[Reason]:
    """Why `moe_backend` cannot run experts of this shape; `compiled` tells it apart from what else is compiled."""
    name = spec.modes.moe_backend
    graph = spec.modes.graph is Graph.FULL
    if compiled is None:
        compiled = spec.modes.compile is not Compile.NONE
    if name in BUILTIN_BACKENDS:
        sentences = builtin_reasons(
            name,
            device.type,
            spec.modes.quant.value,
            shape.num_experts,
            shape.hidden_size,
            shape.intermediate_size,
            compiled,
            graph,
            device.capability,
            dtype=compute_dtype(spec.modes.quant).value,
            device_name=device.name,
        )
    elif name in PEER_BACKENDS:
        sentences = peer_reasons(
            name,
            device_type=device.type,
            capability=device.capability,
            quant=spec.modes.quant.value,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            compile=compiled,
        )
    elif ":" in name:
        sentences = _own_backend(name)
    elif (registered := find_backend(name)) is not None:
        quant = spec.modes.quant
        dtype = compute_dtype(quant)
        if quant is not dtype and not registered.takes_quant:
            return [Reason("moe_backend", f"{name} takes unquantised weights only, not {quant}.")]
        sentences = registered.supports(
            **({} if quant is dtype else {"quant": quant.value}),
            device_type=device.type,
            dtype=dtype.value,
            num_experts=shape.num_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            top_k=shape.top_k,
            compile=compiled,
            graph=graph,
        )
    else:
        allowed = choices([*BACKENDS, "your own as package.module:function"])
        sentences = [f"moe_backend: must be {allowed}, not {name!r}."]
    return [Reason("moe_backend", ended(text)) for text in sentences]


def _own_backend(name: str) -> list[str]:
    """Whether `package.module:function` names a module that is here. It is imported in the worker alone."""
    module, _, function = name.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return [f"A backend of your own is written package.module:function, not {name!r}."]
    if not module_exists(module):
        return [f"The module {module} of the backend {name!r} cannot be found on Python's path."]
    return []


def module_exists(module: str) -> bool:
    """Whether a dotted module can be found, without importing its parents (they might import torch)."""
    places = None
    parts = module.split(".")
    for index in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: index + 1]), places)
        if spec is None:
            return False
        places = spec.submodule_search_locations
        if places is None and index + 1 < len(parts):
            return False
    return True


def weight_bytes(spec: RunSpec, shape: ModelShape) -> int:
    """Bytes of all experts of the layer in the format asked for."""
    modes = spec.modes
    one = expert_bytes(
        modes.quant,
        shape.hidden_size,
        shape.intermediate_size,
        group_size=modes.group_size,
        zero_points=modes.zero_points,
    )
    return shape.num_experts * one


def workspace_bytes(spec: RunSpec, shape: ModelShape) -> int:
    """Bytes of inputs, output and what passes between the two products: gate and up, the intermediate, routed rows."""
    rows = spec.num_tokens * shape.top_k
    size = activation_bytes(spec.modes.quant)
    routed = rows * (3 * shape.intermediate_size + shape.hidden_size) * size
    return routed + spec.num_tokens * shape.hidden_size * (2 * size + 4)


def memory_sentence(spec: RunSpec, shape: ModelShape, device: DeviceInfo) -> tuple[str, bool] | None:
    """Why the layer does not fit, and whether fewer tokens would help; None where it may fit."""
    if device.memory_bytes is None:
        return None
    weights, work = weight_bytes(spec, shape), workspace_bytes(spec, shape)
    if weights + work <= device.memory_bytes:
        return None
    sentence = (
        f"The layer needs {(weights + work) / _GIB:.1f} GiB ({weights / _GIB:.1f} GiB of weights and "
        f"{work / _GIB:.1f} GiB to work in); {device.name} has {device.memory_bytes / _GIB:.1f} GiB."
    )
    return sentence, weights <= device.memory_bytes
