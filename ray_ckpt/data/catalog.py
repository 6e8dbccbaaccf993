"""Which data a run is trained on: one folder, or several that are mixed.

    --data /data/web                                         one source, in its own order
    --data web=/data/web:7 --data code=/data/code:3          a mixture: 7 rows of 10 from web

One source, named or not, is trained in its plain order (:mod:`ray_ckpt.data.order`); several in that of
:mod:`ray_ckpt.data.mixture`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ray_ckpt.data.index import DataError, DataIndex, combined_fingerprint, load_index
from ray_ckpt.data.mixture import MAX_WEIGHTS
from ray_ckpt.errors import ConfigError

_FORM = "write NAME=PATH:WEIGHT, such as web=/data/web:7"
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)=(?P<rest>.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One folder of training data.

    Attributes:
        name: of the source; empty for a plain path.
        path: its folder.
        weight: rows of it in every ``sum(weights)`` rows.
    """

    name: str
    path: str
    weight: int = 1

    def __str__(self) -> str:
        return f"{self.name}={self.path}:{self.weight}" if self.name else self.path

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.name or self.path


def parse_sources(values: Sequence[str]) -> tuple[DataSource, ...]:
    """The sources that ``--data`` names.

    Args:
        values: each a plain path, or ``NAME=PATH:WEIGHT``.

    Raises:
        ConfigError: a value of neither form, a name given twice, or several of which some have no name.
    """
    sources = tuple(map(_parse, values))
    if len(sources) < 2:
        return sources
    for source in sources:
        if not source.name:
            raise ConfigError(
                f"--data {source.path}: several sources need a name and a weight each; {_FORM}."
            )
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"--data {name}=...: the name is given twice; give each source its own."
            )
    total = sum(source.weight for source in sources)
    if total > MAX_WEIGHTS:
        raise ConfigError(
            f"--data: the weights add up to {total}, the most is {MAX_WEIGHTS}: they are rows of a block "
            "whose proportions are exact, not numbers of tokens. Divide all of them by one number."
        )
    return sources


def _parse(value: str) -> DataSource:
    named = _NAMED.fullmatch(value)
    if named is None:
        if value.lstrip().startswith("="):
            raise ConfigError(f"--data {value}: the name is missing; {_FORM}.")
        return DataSource(name="", path=value)
    name = named["name"]
    path, colon, weight = named["rest"].rpartition(":")
    if not colon or not path.strip():
        raise ConfigError(
            f"--data {value}: the source {name!r} lacks a path or a weight; {_FORM}. (A folder whose name has "
            "= in it is written ./NAME.)"
        )
    if not re.fullmatch(r"[0-9]+", weight) or int(weight) < 1:
        raise ConfigError(
            f"--data {value}: the weight {weight!r} must be a whole number of at least 1; to leave a source "
            "out, leave out its --data."
        )
    return DataSource(name=name, path=path, weight=int(weight))


@dataclass(frozen=True, kw_only=True)
class MixedIndex:
    """What the sources of a mixture are.

    Attributes:
        sources: their names, folders and weights.
        parts: the index of each.
    """

    sources: tuple[DataSource, ...]
    parts: tuple[DataIndex, ...]

    @property
    def seq_len(self) -> int:
        """Token ids in a row, of any source."""
        return self.parts[0].seq_len

    @cached_property
    def vocab_size(self) -> int | None:
        """Token ids are smaller than this; None when no source recorded it."""
        return next((part.vocab_size for part in self.parts if part.vocab_size), None)

    @cached_property
    def dtype(self) -> str:
        """An integer type that holds the token ids of every source."""
        joined = np.result_type(*(part.dtype or "int64" for part in self.parts))
        return str(joined) if joined.kind in "iu" else "int64"  # uint64 and int64 make a float

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(part.num_rows for part in self.parts)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of names, weights and content of all sources."""
        return combined_fingerprint(
            [
                part
                for source, index in zip(self.sources, self.parts, strict=True)
                for part in (source.name, source.weight, index.fingerprint)
            ]
        )


Index = DataIndex | MixedIndex


def load_data(sources: Sequence[DataSource]) -> Index:
    """Describes the data of a run.

    Raises:
        ConfigError: no source.
        DataError: a folder that is no data, or sources that do not fit together.
    """
    if not sources:
        raise ConfigError(
            "--data: no folder is named; give one, or call resolve() for the default."
        )
    parts = tuple(load_index(source.path) for source in sources)
    if len(parts) == 1:
        return parts[0]
    for source, part in zip(sources, parts, strict=True):
        _check_fit(sources, parts, source, part)
    return MixedIndex(sources=tuple(sources), parts=parts)


def _check_fit(
    sources: Sequence[DataSource], parts: Sequence[DataIndex], source: DataSource, part: DataIndex
) -> None:
    """Holds a source against the first that says the same of itself."""
    rules = (
        ("seq_len", "tokens in a row", "prepare one of them again with the other's --seq-len"),
        ("tokenizer", "as its tokenizer", "prepare them with one tokenizer"),
        ("vocab_size", "tokens in its vocabulary", "prepare them with one tokenizer"),
    )
    for field, what, fix in rules:
        mine = getattr(part, field)
        other, theirs = next(
            (
                (s, getattr(p, field))
                for s, p in zip(sources, parts, strict=True)
                if getattr(p, field) is not None
            ),
            (source, mine),
        )
        if mine is not None and mine != theirs:
            raise DataError(
                f"--data {source.name}: {source.path} has {mine} {what}, {other.name} ({other.path}) has "
                f"{theirs}. All sources of a mixture must be alike in this: {fix}."
            )
