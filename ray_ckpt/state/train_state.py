"""Everything that decides how training goes on, as one DCP ``Stateful`` made of tensors.

Tensors only: DCP pickles whatever is not a tensor, and nothing here is to be unpickled from storage.
What is naturally a number or a word (the optimizer's hyper-parameters, the scheduler, the scaler) goes
into one JSON document, kept as a uint8 tensor under ``scalars``.

Layout of the state dict (DCP joins the names with dots)::

    model.<fqn>                       parameters and persistent buffers
    optimizer.state.<fqn>.exp_avg     optimizer tensors, by parameter name
    ema.<fqn>                         averaged weights
    <item>.<path>                     tensors of a scheduler, scaler or registered item
    progress.step|samples|tokens|...  int64 scalars
    scalars                           uint8 [n], JSON: of each item, what is not a tensor
    per_rank.rank00003...             items that differ from rank to rank, laid out alike

Keys are names of parameters, never positions, and DCP stores global tensors: a checkpoint of any world
size and of DDP or FSDP2 loads into any other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.errors import RestoreError, StateError
from ray_ckpt.state.codec import decode, encode
from ray_ckpt.state.fit import Allowed, Difference
from ray_ckpt.state.optimizers import OptimizerPart, fits
from ray_ckpt.state.parts import Entry, HasState, ModulePart, Part, make_part
from ray_ckpt.state.rng import rank_key

logger = logging.getLogger(__name__)

SCALARS = "scalars"
PER_RANK = "per_rank"
PROGRESS = "progress"
_RESERVED = ("model", "optimizer", "scheduler", "scaler", "ema", PROGRESS, SCALARS, PER_RANK, "rng")


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far the run is. Counts what was trained, never what was fetched.

    Attributes:
        step: finished optimizer steps.
        samples: the sample offset.
        tokens: tokens that gave a loss.
        grad_exponent: scale of the next step's gradient sums in exact mode, 0 otherwise.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    grad_exponent: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a checkpoint holds, as far as it is known before its tensors are loaded.

    Attributes:
        where: the checkpoint, for messages.
        entries: its tensors by name, without the random generators.
        documents: the JSON of each item.
        own: this rank's JSON of the items that differ from rank to rank; None when the world size is another.
    """

    where: str
    entries: Mapping[str, Entry]
    documents: Mapping[str, Any]
    own: Mapping[str, Any] | None


class TrainState:
    """Model, optimizer, scheduler, scaler, averaged weights, progress and the user's own items.

    Args:
        model: plain, wrapped by DDP, or sharded by FSDP2.
        optimizer: its optimizer, or several that share no parameter.
        scheduler: optional; stepped by the training function.
        scaler: optional gradient scaler.
        ema: optional averaged weights: a module such as ``AveragedModel``, or an object with ``state_dict()`` and
            ``load_state_dict()``. FSDP2 models cannot be copied: average a copy of the plain model, and shard both.

    A checkpoint has one value of each buffer. Buffers that differ from rank to rank (running statistics of BatchNorm
    under FSDP2) are not repeated bit for bit: synchronise them, or leave them out (``persistent=False``).

    Raises:
        StateError: the optimizer is none, or has parameters that are not the model's.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: HasState | None = None,
        scaler: HasState | None = None,
        ema: torch.nn.Module | HasState | None = None,
    ) -> None:
        self.model = model
        self.optimizer: Any = optimizer  # as it was given: one, or several
        self.progress = Progress()
        several = _optimizers(optimizer)
        weights = ModulePart("model", model)
        self._optimizer = OptimizerPart(weights, several)
        self._optimizer.make_early()
        self._table: dict[str, Part] = {"model": weights, "optimizer": self._optimizer}
        self._own_table: dict[str, Part] = {}
        self._parts: dict[str, Any] = {}
        self._allowed = Allowed()
        for name, item in (("scheduler", scheduler), ("scaler", scaler), ("ema", ema)):
            if item is not None:
                self._parts[name] = item
                self._table[name] = make_part(name, item)

    @property
    def ema(self) -> torch.nn.Module | HasState | None:
        """The averaged weights, as they were given."""
        return self._parts.get("ema")

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, also when there is one."""
        return self._optimizer.optimizers

    def register(
        self, name: str, item: torch.nn.Module | HasState, *, per_rank: bool = False
    ) -> None:
        """Adds an object to what is saved and restored; before ``restore()``, on every rank.

        Its state may hold tensors (sharded ones are resharded), numbers, strings, booleans, None, and lists, tuples
        and dicts with string or integer keys. An object decides itself whether it takes tensors of another shape
        than it has when it is new; a module's tensors keep their shapes.

        Args:
            name: letters, digits, "_" and "-".
            item: with ``state_dict()`` and ``load_state_dict()``. Its state is the same on every rank, or sharded.
            per_rank: each rank has a state of its own. It is restored when the world size is that of the save;
                otherwise the item stays as it is, with a warning, as there is no rank to give it to.

        Raises:
            StateError: the name is taken, or the object has no state.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in _RESERVED:
            raise StateError(
                f"register({name!r}): a name has letters, digits, '_' and '-', and is none of {', '.join(_RESERVED)}."
            )
        if name in self._table or name in self._own_table:
            raise StateError(
                f"register({name!r}): there is an item of this name. Take another one."
            )
        self._parts[name] = item
        (self._own_table if per_rank else self._table)[name] = make_part(name, item)

    @property
    def is_scaled(self) -> bool:
        """Whether there is a gradient scaler."""
        return "scaler" in self._parts

    def state_dict(self) -> dict[str, Any]:
        """The state as nested dictionaries of tensors; model tensors are references, not copies.

        Raises:
            StateError: a value that cannot be saved, with its path.
        """
        state = _pack_all(self._table)
        state[PROGRESS] = {k: torch.tensor(v) for k, v in asdict(self.progress).items()}
        if self._own_table:
            state[PER_RANK] = {rank_key(_rank()): _pack_all(self._own_table)}
        return state

    def targets(
        self, saved: Saved, device: torch.device, allow_missing: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """A state dict to load a checkpoint into, for :meth:`load_state_dict` afterwards.

        Its model tensors are those of the model.

        Args:
            saved: what the checkpoint holds.
            device: of this rank.
            allow_missing: items, or tensors by the first parts of their names, that may be missing (they keep their
                fresh values) or surplus. The optimizer as a whole starts fresh if it is named and does not fit.

        Raises:
            RestoreError: a name that only one side has, or a tensor of another shape. Lists both sides.
        """
        self._allowed = allowed = Allowed(allow_missing)
        difference = Difference(allowed)
        difference.compare("items", self._table, saved.documents)
        documents = {name: each for name, each in saved.documents.items() if name in self._table}
        others = {name for name in saved.documents if name not in documents}
        settings = documents.get("optimizer")
        whole = settings is not None and "optimizer" in allowed
        if whole and not fits(self._optimizer, settings, allowed):
            del documents["optimizer"]
            others.add("optimizer")
            difference.kept.append("optimizer")
        target: dict[str, Any] = {}
        for name, document in documents.items():
            below = _below(saved.entries, name)
            target[name] = self._table[name].targets(document, below, device)
        target[PROGRESS] = {k: torch.tensor(0) for k in asdict(self.progress)}
        others |= {SCALARS, PER_RANK}
        there = {name for name in saved.entries if name.partition(".")[0] not in others}
        if "optimizer" in documents:
            there -= {f"optimizer.{path}" for path in self._optimizer.strangers(settings)}
        _match(target, saved.entries, there, difference)
        if "optimizer" in documents:
            self._optimizer.compare(settings, difference)
        target[SCALARS] = encode(documents)
        self._own_targets(target, saved, difference, device)
        difference.settle(saved.where)
        return {part: tensors for part, tensors in target.items() if len(tensors)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts a state back.

        Raises:
            RestoreError: items are missing or surplus, or one of them does not take its saved state.
        """
        documents = decode(state_dict[SCALARS])
        missing, surplus = set(self._table) - set(documents), set(documents) - set(self._table)
        if surplus or any(name not in self._allowed for name in missing):
            raise RestoreError(
                f"the checkpoint holds the state of {sorted(documents)}, the training function has "
                f"{sorted(self._table)}: give TrainState the same parts as the run that saved it."
            )
        for name, document in documents.items():
            self._table[name].load(document, state_dict.get(name, {}))
        counts = {k: int(v) for k, v in state_dict[PROGRESS].items()}
        self.progress = Progress(**{**asdict(self.progress), **counts})
        own = state_dict.get(PER_RANK, {}).get(rank_key(_rank()))
        if own is not None:
            for name, document in decode(own[SCALARS]).items():
                self._own_table[name].load(document, own.get(name, {}))

    def _own_targets(
        self, target: dict[str, Any], saved: Saved, difference: Difference, device: torch.device
    ) -> None:
        """Adds this rank's part of the items that differ from rank to rank."""
        if saved.own is None:
            if self._own_table:
                logger.warning(
                    "%s was saved by another number of workers: %s differ from rank to rank, and start fresh",
                    saved.where,
                    ", ".join(self._own_table),
                )
            return
        difference.compare("items", self._own_table, saved.own)
        documents = {name: each for name, each in saved.own.items() if name in self._own_table}
        if not documents:
            return
        prefix = f"{PER_RANK}.{rank_key(_rank())}"
        entries = _below(saved.entries, prefix)
        own: dict[str, Any] = {
            name: self._own_table[name].targets(document, _below(entries, name), device)
            for name, document in documents.items()
        }
        _match(own, entries, {n for n in entries if n.partition(".")[0] in own}, difference)
        target[PER_RANK] = {rank_key(_rank()): {**own, SCALARS: encode(documents)}}


def _optimizers(given: object) -> tuple[torch.optim.Optimizer, ...]:
    if isinstance(given, torch.optim.Optimizer):
        return (given,)
    found = tuple(given) if isinstance(given, Sequence) else ()
    if not found or not all(isinstance(each, torch.optim.Optimizer) for each in found):
        raise StateError(
            f"TrainState(optimizer={type(given).__name__}): give the optimizer that the training function steps, or "
            "a list of them: without its state a resume is not the same run."
        )
    return found


def _pack_all(table: Mapping[str, Part]) -> dict[str, Any]:
    packed = {name: part.pack() for name, part in table.items()}
    state: dict[str, Any] = {name: tensors for name, (_, tensors) in packed.items() if tensors}
    state[SCALARS] = encode({name: document for name, (document, _) in packed.items()})
    return state


def _match(
    target: dict[str, Any], entries: Mapping[str, Entry], there: set[str], difference: Difference
) -> None:
    """Compares names and shapes, and takes out of ``target`` what is not there to load."""
    here = {f"{part}.{path}": (part, path) for part, tensors in target.items() for path in tensors}
    difference.compare("tensors and settings", here, there)
    for name, (part, path) in here.items():
        if name in entries:
            difference.compare_entry(name, Entry.of(target[part][path]), entries[name])
        else:
            del target[part][path]


def _below(entries: Mapping[str, Entry], part: str) -> dict[str, Entry]:
    prefix = f"{part}."
    return {n[len(prefix) :]: e for n, e in entries.items() if n.startswith(prefix)}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
