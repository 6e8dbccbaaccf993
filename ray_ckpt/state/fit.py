"""Both sides of a restore: what the run has, what the checkpoint holds, and what may differ.

A silent difference is how a resumed run goes wrong: a key that is made lazily is not loaded, a renamed one starts
anew. Every difference is therefore an error that lists both sides, unless it was named as allowed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ray_ckpt.errors import RestoreError
from ray_ckpt.state.parts import Entry

logger = logging.getLogger(__name__)

Kind = Literal["items", "tensors and settings"]
_KINDS: tuple[Kind, ...] = ("items", "tensors and settings")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Allowed:
    """Names that may be missing or surplus: items, or tensors by name or by the first parts of it.

    ``model.head`` allows ``model.head`` and ``model.head.weight``, but not ``model.header``.
    """

    names: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(
            name == each or name.startswith(f"{each.removesuffix('.')}.") for each in self.names
        )


@dataclass(slots=True)
class Difference:
    """What only one side has; collected in full before anything is loaded.

    Attributes:
        allowed: names that may differ.
        missing: names that the checkpoint lacks, by kind.
        surplus: names that only the checkpoint has, by kind.
        misfits: tensors that are there with another shape or type, in words.
        kept: names that keep their fresh values.
        ignored: names whose saved values are not used.
    """

    allowed: Allowed
    missing: dict[Kind, list[str]] = field(default_factory=dict)
    surplus: dict[Kind, list[str]] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def compare(self, kind: Kind, here: Iterable[str], there: Iterable[str]) -> None:
        """Notes the names of which only one side knows."""
        ours, saved = set(here), set(there)
        for names, bad, waived in (
            (ours - saved, self.missing, self.kept),
            (saved - ours, self.surplus, self.ignored),
        ):
            for name in sorted(names):
                if name in self.allowed:
                    waived.append(name)
                else:
                    bad.setdefault(kind, []).append(name)

    def compare_entry(self, name: str, here: Entry, there: Entry) -> None:
        """Notes a tensor that is not what it was."""
        if here != there:
            self.misfits.append(f"{name} is {here} here and {there} in the checkpoint")

    @property
    def found(self) -> bool:
        """Whether there is a difference that is not allowed."""
        return bool(self.missing or self.surplus or self.misfits)

    def settle(self, where: str) -> None:
        """Warns of what was allowed, and refuses the rest.

        Args:
            where: the checkpoint, for messages.

        Raises:
            RestoreError: lists both sides.
        """
        if self.missing or self.surplus:
            raise RestoreError(
                f"{where} does not hold what the training function has. {self._sides()} Give TrainState the parts of "
                "the run that saved it (register() items before restore()), or use another run name. What may start "
                "fresh, or be left out, is named by --saving.allow-missing NAME."
            )
        if self.misfits:
            raise RestoreError(
                f"{where} is intact but does not fit the model or optimizer: {_some(self.misfits, '; ')}. Use the "
                "model and optimizer of the run that saved it, or another run name."
            )
        if self.kept:
            logger.warning("not in %s, starts fresh: %s", where, _some(self.kept))
        if self.ignored:
            logger.warning("in %s, but not used: %s", where, _some(self.ignored))

    def _sides(self) -> str:
        kinds = [kind for kind in _KINDS if kind in self.missing or kind in self.surplus]
        missing = "; ".join(f"{kind}: {_some(self.missing.get(kind, []))}" for kind in kinds)
        surplus = "; ".join(f"{kind}: {_some(self.surplus.get(kind, []))}" for kind in kinds)
        return f"Not in the checkpoint: {missing}. Only in the checkpoint: {surplus}."


def _some(names: list[str], comma: str = ", ") -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return comma.join(names[:_SHOWN]) + more
