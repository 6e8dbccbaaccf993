"""Whether a restored state is the one that was saved: pure, from what was measured at the commit and now.

How far may two losses of the same weights on the same rows be apart? On the same machine and kind of device, with
the same libraries and number of threads, nothing differs, and the bits are the same whatever the world size was: the
rows go through the whole model on one rank, in passes of the same size. What may differ is the order in which another
processor, library or number of threads adds up. Each operation of float32 rounds by 6e-8 of its result, and a mean over
all tokens evens most of that out: passes of another size, and the same model with 64 bits, gave losses at most 7e-8
apart (decoders of 2 to 12 layers, new and with weights of up to 8 times the size). 2e-6 leaves room; ten times that
would let another activation pass in a model that has hardly been trained. Logits do not become small with the loss, so
the measure is the loss, or 1 if that is more. On GPUs matrices may be multiplied with 10 bits (TF32) or 8 (bfloat16),
in another order on another kind of GPU: 1e-3. Between a GPU and a CPU a training function will use bfloat16 on one of
them only: 2e-2, and a drill on another kind of device finds less. The values for GPUs are reasoned, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_ckpt.validation import Validated

SAME_CPU, SAME_GPU, OTHER_DEVICE = 2e-6, 1e-3, 2e-2
NORM_TOLERANCE = (
    1e-6  # summed with 64 bits from the stored values; only the order of the sum is another
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a comparison says.

    Attributes:
        problems: what is not as it was, one sentence each.
        notes: what could not be compared.
        difference: between the losses; None when they were not compared.
        tolerance: the greatest difference that is let pass; None when they were not compared.
        same_bits: whether they are equal to the last bit; None when they were not compared.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    difference: float | None = None
    tolerance: float | None = None
    same_bits: bool | None = None


def tolerance_of(saved_on: str, drilled_on: str) -> float:
    """The relative difference that kinds of devices explain."""
    if saved_on != drilled_on:
        return OTHER_DEVICE
    return SAME_CPU if saved_on == "cpu" else SAME_GPU


def judge_loss(
    expected: Validated | None, found: Validated | None, tolerance: float | None = None
) -> Judgement:
    """Compares the loss of a commit with that of the restored model.

    Args:
        expected: of the commit; None when none was measured.
        found: after the restore; None when the training function gives no function for it.
        tolerance: relative; None takes that of the kinds of devices.
    """
    if expected is None:
        said = "" if found is None else f" (now it is {found.loss:.6g})"
        return Judgement(
            notes=(f"no validation loss was logged at its commit{said}: none is compared",)
        )
    if found is None:
        return Judgement(
            problems=(
                "a validation loss was logged at its commit, and the training function no longer calls "
                "validate_with(): nothing says that the model is the one that was saved",
            )
        )
    if (found.digest, found.rows) != (expected.digest, expected.rows):
        return Judgement(
            problems=(
                f"the rows to validate on are others ({found.rows} rows, digest {found.digest}) than at its commit "
                f"({expected.rows} rows, digest {expected.digest}): drill with the data, the tokenizer and the --seed "
                "of the run",
            )
        )
    same_bits = found.loss.hex() == expected.loss.hex()
    relative = tolerance_of(expected.device, found.device) if tolerance is None else tolerance
    allowed = relative * max(1.0, abs(expected.loss)) if math.isfinite(expected.loss) else 0.0
    difference = 0.0 if same_bits else abs(found.loss - expected.loss)
    # Written so that a difference that is no number is none that is let pass.
    problems = (
        ()
        if difference <= allowed
        else (
            f"the validation loss is {found.loss!r}, it was {expected.loss!r} at its commit: {difference:.3g} apart, "
            f"{allowed:.3g} is let pass. The weights, or the code that makes a loss of them, are not those of the save",
        )
    )
    return Judgement(
        problems=problems, difference=difference, tolerance=allowed, same_bits=same_bits
    )


def judge_state(saved: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    """Compares what the guard saw of the state at the save with what it sees now; problems, one sentence each.

    Args:
        saved: ``guard`` of the manifest.
        found: report of a scan (:func:`ray_ckpt.checkpoint.guard.report`).
    """
    problems = [
        f"restored, {finding['text'].replace(' on rank 0', '')}" for finding in found["findings"]
    ]
    before: Any
    now: Any
    before, now = saved.get("param_norm"), found.get("param_norm")
    known = isinstance(before, int | float) and isinstance(now, int | float)
    if known and not math.isclose(before, now, rel_tol=NORM_TOLERANCE):
        problems.append(
            f"the norm of the parameters is {now!r}, it was {before!r} at the save: the weights are others"
        )
    return tuple(problems)
