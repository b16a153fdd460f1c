"""Whether a checkpoint holds what its model needs, said at once and before any of it is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from workbench.errors import InvalidInput
from workbench.models.network.names import LM_HEAD, expected_tensors, layer_of
from workbench.models.network.shapes import NetworkConfig
from workbench.models.network.stored import StoredTensors

# More names than this are told as patterns: `layers.{0..26}.mlp.experts.{0..63}.up_proj.weight`.
_LISTED = 24
# Buffers and scales of a cache that checkpoints carry along, and that nothing here reads.
_HARMLESS = re.compile(
    r"(rotary_emb\.inv_freq|self_attn\.(k_scale|v_scale|(k|v)_proj\.(k_scale|v_scale|output_scale)))$"
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_tensors(source: StoredTensors, config: NetworkConfig, whole: NetworkConfig | None = None) -> None:
    """Compare names, shapes and number formats; nothing is loaded.

    Args:
        source: the checkpoint.
        config: the network that is run, whose tensors must be there.
        whole: the same with all layers of the model, whose tensors may be there; None where `config` has them all.

    Raises:
        InvalidInput: tensors that are missing, that the model does not have, of another shape, or that cannot be read:
            all of them in one sentence.
    """
    whole = whole or config
    needed, known = expected_tensors(config), expected_tensors(whole)
    shapes, faults = source.shapes(), source.faults()
    missing = [name for name in needed if name not in shapes]
    extra = [name for name in shapes if name not in known and not harmless(name, whole)]
    misshapen = {
        name: f"{list(shapes[name])}, must be {list(shape)}"
        for name, shape in known.items()
        if name in shapes and shapes[name] != shape
    }
    broken = {name: why for name, why in faults.items() if not harmless(name, whole)}
    parts = [
        f"{word} {len(names)}: {', '.join(listed(names))}"
        for word, names in (("missing", missing), ("not of this model", extra))
        if names
    ]
    parts += [
        f"{word} {len(told)}: {_grouped(told)}"
        for word, told in (("of another shape", misshapen), ("not readable", broken))
        if told
    ]
    if parts:
        raise InvalidInput(f"model: the tensors of {source.label} are not those of {config.name}: {'; '.join(parts)}")


def harmless(name: str, config: NetworkConfig) -> bool:
    """Whether a tensor that the network does not need may be there all the same.

    These are the rotary embedding's buffer, scales of a quantised cache, the output of a model that uses its embedding
    for it, and DeepSeek-V3's layers behind the last, which predict further tokens.
    """
    if config.tie_embeddings and name == LM_HEAD:
        return True
    layer = layer_of(name)
    beyond = config.architecture == "deepseek_v3" and layer is not None and layer >= config.num_layers
    return beyond or _HARMLESS.search(name) is not None


def listed(names: Collection[str]) -> list[str]:
    """The names, or patterns that stand for exactly these where they are many.

    Layers 0 to 2 with experts 0 and 2 each: `layers.{0..2}.experts.{0, 2}.weight`.
    """
    if len(names) <= _LISTED:
        return list(names)
    # The last number first: experts of one layer become one pattern; then layers whose patterns are alike.
    return _folded(_folded(names, last=True), last=False)


def _folded(names: Iterable[str], *, last: bool) -> list[str]:
    """Names that differ in their last (or first) number alone, as one."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = list(_NUMBER.finditer(name))
        match = found[-1 if last else 0] if found else None
        if match is None:
            groups[name, ""] = []
        else:
            groups.setdefault((name[: match.start()], name[match.end() :]), []).append(int(match[0]))
    return [f"{before}{_set(numbers) if numbers else ''}{after}" for (before, after), numbers in groups.items()]


def _grouped(told: Mapping[str, str]) -> str:
    """Names by what is said of them."""
    groups: dict[str, list[str]] = {}
    for name, why in told.items():
        groups.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(listed(names))} ({why})" for why, names in groups.items())


def _set(numbers: Iterable[int]) -> str:
    """`{0..5, 7}` for 0 to 5 and 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return str(runs[0][0])
    return "{" + ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"
