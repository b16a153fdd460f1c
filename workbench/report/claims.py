"""What the pull requests behind two presets claimed of their decode step, and what was measured beside it here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from workbench.errors import InvalidInput, choices
from workbench.plots.select import points, records, varying
from workbench.plots.style import MODE_AXES
from workbench.report.winners import verdict

CLAIMED = ("claimed_ms", "claimed_against_ms", "claimed_gain")
OWN = ("own_ms", "own_against_ms", "own_gain", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row of a pull request's table: input 128, output 8, on a GPU that it does not name.

    Attributes:
        what: the row in words.
        fields: short field names and values of the runs that stand beside it.
        against: the fields in which the run that it is compared with differs.
        decode_ms: median of a decode step.
        against_ms: that of the run that it is compared with.
    """

    what: str
    fields: Mapping[str, Any]
    against: Mapping[str, Any]
    decode_ms: float
    against_ms: float

    @property
    def gain(self) -> float:
        """How many times as fast."""
        return self.against_ms / self.decode_ms


def _compiled(what: str, decode_ms: float, compile: str, scope: str) -> Claim:
    return Claim(
        what=what,
        fields={"model": "deepseek-v2-lite", "batch_size": 1, "compile": compile, "compile_scope": scope},
        against={"compile": "none", "compile_scope": "all"},
        decode_ms=decode_ms,
        against_ms=9.21,
    )


def _graph(what: str, model: str, attention: str, mla: str, with_ms: float, without_ms: float) -> Claim:
    fields = {"model": model, "batch_size": 1, "attention_backend": attention, "mla_decode": mla, "graph": "full"}
    return Claim(what=what, fields=fields, against={"graph": "disabled"}, decode_ms=with_ms, against_ms=without_ms)


_CODER = "deepseek-coder-v2-lite"
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "moe-torch-compile": (
        _compiled("no compile", 9.21, "none", "all"),
        _compiled("compile, MoE left out", 7.35, "default", "skip_moe"),
        _compiled("compile, MoE too", 6.82, "default", "all"),
    ),
    "cuda-graph-attention": (
        _graph("Llama-3-8B, triton", "llama-3-8b", "triton", "absorbed", 7.06, 9.28),
        _graph("Llama-3-8B, flashinfer", "llama-3-8b", "flashinfer", "absorbed", 7.35, 8.23),
        _graph("DeepSeek-Coder-V2-Lite, MLA", _CODER, "triton", "absorbed", 6.22, 24.53),
        _graph("the same, another tester, MLA off", _CODER, "triton", "expanded", 7.93, 36.45),
        _graph("the same, another tester, MLA on", _CODER, "triton", "absorbed", 6.21, 19.16),
    ),
}
"""Preset -> the rows of its pull request."""


def beside(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """A pull request's rows with what was measured of the same model, modes and batch.

    Args:
        name: of the preset.
        frame: `Results.frame()`; repeats of the anchor and points that were not measured are left out.

    Returns:
        One row a claim, and for each set of other modes that was measured: `what`; the other modes that vary;
        `claimed_ms`, `claimed_against_ms` of the run that it is compared with, and `claimed_gain`; the same of a decode
        step here, `own_ms`, `own_against_ms` and `own_gain`, and the `verdict` on them; missing where not measured.

    Raises:
        InvalidInput: no claims of that name.
    """
    if name not in CLAIMS:
        raise InvalidInput(f"claims: must be those of {choices(CLAIMS)}, not {name!r}")
    claims = CLAIMS[name]
    shown = points(frame)
    shown = shown[shown["latency_us"].notna()]
    told = {field for claim in claims for field in (*claim.fields, *claim.against)}
    others = [axis for axis in varying(shown, MODE_AXES) if axis not in told]
    measured = records(shown)
    found = []
    for claim in claims:
        rows = [row for row in measured if _is(row, claim.fields)]
        sets = list(dict.fromkeys(tuple(row[axis] for axis in others) for row in rows)) or [("",) * len(others)]
        for values in sets:
            modes = dict(zip(others, values, strict=True))
            base = _last(measured, {**claim.fields, **claim.against, **modes})
            own = _last(rows, modes)
            claimed = (claim.decode_ms, claim.against_ms, claim.gain)
            found.append((claim.what, *values, *claimed, *_own(own, base)))
    return pd.DataFrame(found, columns=["what", *others, *CLAIMED, *OWN])


def _own(own: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> tuple[float, float, float, str]:
    """Milliseconds, those of the base, the gain, and the verdict on it."""
    ms, base_ms = (math.nan if row is None else float(row["latency_us"]) / 1e3 for row in (own, base))
    said = "" if own is None or base is None or own is base else verdict(own, base)
    return ms, base_ms, base_ms / ms, said


def _is(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(row[name] == value for name, value in wanted.items())


def _last(rows: list[dict[str, Any]], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    return next((row for row in reversed(rows) if _is(row, wanted)), None)
