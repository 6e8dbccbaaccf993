"""The guard: whether a state is sane enough to be committed; pure arithmetic over what the ranks found.

A state is refused when a tensor, the loss or the gradient norm of its step is not finite, or when the norm of the
parameters lies far outside what it was at the last saves (weights that were overwritten, zeroed or scaled are finite).

The band around the norm is made to be silent in ordinary training. It is a factor around the median of the last
saves, wider where they scatter more (median absolute deviation of their logarithms), and it takes norms that were
refused into account as well: a few strange saves do not move a median, and a level that stays becomes the new one
after half as many saves as are looked at. So the band can refuse some saves, and never all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

OnNonfinite = Literal["stop", "rollback", "rollback-and-skip", "go-on"]
Kind = Literal["tensor", "loss", "grad_norm", "param_norm"]

# Norms that must be known before one can be called strange.
FEW_SAVES = 4
# Half-width of the band in standard deviations, as the median absolute deviation estimates them.
_SPREADS = 8.0
_MAD_TO_STD = 1.4826  # of a normal distribution
_TOLD = 20  # tensors named in a report: when one is NaN, soon all are


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardRule:
    """What the guard goes by; the options of the same names say more.

    Attributes:
        band_factor: how much more or less than the median of the last saves the norm may be; 0 for no band.
        band_saves: saves that are looked at.
        on_nonfinite: what a run does when it is no longer finite.
        max_rollbacks: rollbacks in a row.
    """

    band_factor: float = 4.0
    band_saves: int = 8
    on_nonfinite: OnNonfinite = "stop"
    max_rollbacks: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing wrong with a state.

    Attributes:
        kind: what is wrong.
        text: in words.
        rank: that found it, None when it belongs to the step as a whole.
        tensor: its name, empty for other kinds.
    """

    kind: Kind
    text: str
    rank: int | None = None
    tensor: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadTensor:
    """A tensor with values that are not finite.

    Attributes:
        name: as in the checkpoint.
        bad: how many values are not finite, of those that this rank holds.
        values: how many it holds.
    """

    name: str
    bad: int
    values: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What one rank found in its part of a state.

    Attributes:
        rank: that looked.
        bad: tensors that are not finite.
        square_sum: of the model's values that count for this rank; a value that all ranks hold counts once.
        names: tensors looked at.
        seconds: that it took.
    """

    rank: int
    bad: tuple[BadTensor, ...]
    square_sum: float
    names: frozenset[str]
    seconds: float


def report(scans: Sequence[Scan]) -> dict[str, Any]:
    """What all ranks together found, as plain values: ``ok, findings, param_norm, checked_tensors, seconds``."""
    findings = [
        Finding(
            kind="tensor",
            text=f"{bad.name}: {bad.bad} of {bad.values} values on rank {scan.rank} are not finite",
            rank=scan.rank,
            tensor=bad.name,
        )
        for scan in scans
        for bad in scan.bad
    ]
    square_sum = math.fsum(scan.square_sum for scan in scans if math.isfinite(scan.square_sum))
    finite = all(math.isfinite(scan.square_sum) for scan in scans)
    return {
        "ok": not findings,
        "findings": [asdict(finding) for finding in findings[:_TOLD]],
        "more_findings": max(0, len(findings) - _TOLD),
        "param_norm": math.sqrt(square_sum) if finite else None,
        "checked_tensors": len(frozenset().union(*(scan.names for scan in scans))),
        "seconds": max((scan.seconds for scan in scans), default=0.0),
    }


def with_step(
    found: Mapping[str, Any], *, loss: float | None, grad_norm: float | None
) -> dict[str, Any]:
    """A report with the findings about the step itself; None says nothing."""
    more: list[Finding] = []
    if loss is not None and not math.isfinite(loss):
        more.append(Finding(kind="loss", text=f"the loss of the step is {loss}"))
    if grad_norm is not None and not math.isfinite(grad_norm):
        more.append(Finding(kind="grad_norm", text=f"the gradient norm of the step is {grad_norm}"))
    findings = [*map(asdict, more), *found.get("findings", [])]
    return {**found, "ok": not findings, "findings": findings}


def judge(
    found: Mapping[str, Any], norms: Sequence[float], rule: GuardRule
) -> list[dict[str, Any]]:
    """Why a state must not be committed; empty when it may.

    Args:
        found: the report of a save.
        norms: parameter norms of the saves before, oldest first.
        rule: to go by.
    """
    findings = list(found.get("findings", []))
    norm = found.get("param_norm")
    if not findings and norm is not None:
        strange = out_of_band(float(norm), norms, rule)
        if strange is not None:
            findings.append(asdict(strange))
    return findings


def out_of_band(norm: float, norms: Sequence[float], rule: GuardRule) -> Finding | None:
    """A finding when a finite norm is far from those of the saves before."""
    logs = [math.log(n) for n in norms if math.isfinite(n) and n > 0.0][-rule.band_saves :]
    if not rule.band_factor or len(logs) < FEW_SAVES:
        return None
    centre = median(logs)
    spread = median(abs(each - centre) for each in logs)
    width = max(math.log(rule.band_factor), _SPREADS * _MAD_TO_STD * spread)
    if norm > 0.0 and abs(math.log(norm) - centre) <= width:
        return None
    # Far fewer saves than 2^1024 apart, but a spread may be any number.
    low, high = math.exp(max(centre - width, -700.0)), math.exp(min(centre + width, 700.0))
    return Finding(
        kind="param_norm",
        text=f"the norm of the parameters is {norm:.4g}, outside {low:.4g} to {high:.4g}: it was "
        f"{math.exp(centre):.4g} (median of the last {len(logs)} saves, --guard.band-factor {rule.band_factor:g})",
    )


def reason(findings: Sequence[Mapping[str, Any]], more: int = 0) -> str:
    """Findings in one sentence."""
    rest = len(findings) - 1 + more
    return f"guard: {findings[0]['text']}" + (f", and {rest} more" if rest else "")


def is_nonfinite(findings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether findings say that a run is no longer finite; a strange norm does not."""
    return any(finding["kind"] != "param_norm" for finding in findings)
