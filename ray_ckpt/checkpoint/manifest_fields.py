"""What a manifest says of a checkpoint, field by field; its file is :mod:`ray_ckpt.checkpoint.manifest`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ray_ckpt.checkpoint.names import checkpoint_name, is_record
from ray_ckpt.checkpoint.paths import folded, path_fault
from ray_ckpt.checkpoint.storing import without_nonfinite
from ray_ckpt.segment import FIRST, Segment
from ray_ckpt.skips import Skip

SCHEMA = 1
CHECKSUM_ALGORITHM = "xxh3_128"

_HEX_DIGEST = re.compile(r"[0-9a-f]{32}")
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")

# Fields that manifests of this schema have not always had: where one lacks, its default holds.
_ADDED = frozenset({"segment", "skipped", "validation"})


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        path: relative to the checkpoint folder, with forward slashes.
        bytes: size.
        checksum: xxh3_128 of the content, 32 lower-case hex digits.
        sha256: of the content, 64 lower-case hex digits; in signed manifests.
    """

    path: str
    bytes: int
    checksum: str
    sha256: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        found: dict[str, Any] = {
            "path": self.path,
            "bytes": self.bytes,
            "checksum": self.checksum,
        }
        return found if self.sha256 is None else {**found, "sha256": self.sha256}

    def __post_init__(self) -> None:
        _require_type("path", self.path, (str,))
        fault = path_fault(self.path)
        if fault is not None:
            raise ValueError(f"file path {self.path!r} {fault}")
        if is_record(self.path):
            raise ValueError(f"file path {self.path!r} is reserved for the checkpoint's own record")
        _require_count("bytes", self.bytes)
        _require_type("checksum", self.checksum, (str,))
        if not _HEX_DIGEST.fullmatch(self.checksum):
            raise ValueError(f"checksum {self.checksum!r} of {self.path!r} is not 32 hex digits")
        if self.sha256 is not None:
            _require_type("sha256", self.sha256, (str,))
            if not _HEX_SHA256.fullmatch(self.sha256):
                raise ValueError(f"sha256 {self.sha256!r} of {self.path!r} is not 64 hex digits")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a committed checkpoint holds; a wrong value is refused when it is built.

    `guard`, `versions` and `validation` hold plain JSON values. Numbers in `metrics` may be NaN or
    infinite (stored as the strings "nan", "inf", "-inf", since JSON has no such numbers): a strange
    loss is worth recording, and refusing the state is the guard's business.

    Every field is required when a manifest is read, but for those that came later (`segment`, `skipped`,
    `validation`): a checkpoint that says nothing of them was made in the first segment, nothing was skipped, and no
    validation loss was measured.
    """

    run: str
    """Name of the run."""
    step: int
    """Number of finished optimizer steps."""
    sample_offset: int
    """Samples the run has trained on."""
    tokens: int
    """Tokens the run has trained on."""
    world_size: int
    """Workers that wrote this checkpoint."""
    generation: int
    """Attempt that wrote this checkpoint."""
    committed_at: float
    """Time of the commit, seconds since the epoch."""
    files: tuple[FileEntry, ...]
    """Every file of the checkpoint except this manifest."""
    parallel: str
    """How the model was spread over the workers, such as "ddp" or "fsdp"."""
    guard: Mapping[str, Any]
    """What the guard found when it let this state pass."""
    metrics: Mapping[str, float]
    """Losses and the like at this step."""
    config_fingerprint: str
    """Digest of the configuration that decides the course of training."""
    data_fingerprint: str
    """Digest of the training data."""
    versions: Mapping[str, str]
    """Library versions."""
    bitwise_comparable: bool
    """Whether a resume with the same world size should repeat the same bits."""
    segment: Mapping[str, Any] = field(default_factory=FIRST.mark)
    """Segment of the run that it was made in: `number`, `start_step`, `start_offset` (samples), `reason`."""
    skipped: tuple[Skip, ...] = ()
    """Global batches that the run left out of its order; none in manifests older than this field."""
    validation: Mapping[str, Any] = field(default_factory=dict)
    """How `metrics.validation_loss` was measured, and on what; empty when it was not."""
    checksum_algorithm: str = CHECKSUM_ALGORITHM
    """Algorithm of the checksums in `files`."""
    schema: int = SCHEMA
    """Version of this format."""

    def __post_init__(self) -> None:
        for name in ("step", "sample_offset", "tokens", "world_size", "generation", "schema"):
            _require_count(name, getattr(self, name))
        for name in ("run", "parallel", "config_fingerprint", "data_fingerprint"):
            _require_type(name, getattr(self, name), (str,))
        for name in ("guard", "metrics", "versions", "validation"):
            _require_type(name, getattr(self, name), (Mapping,))
        _require_type("segment", self.segment, (Mapping,))
        if missing := FIRST.mark().keys() - self.segment.keys():
            raise ValueError(f"segment.{min(missing)} is missing")
        Segment.from_json(self.segment)
        _require_type("bitwise_comparable", self.bitwise_comparable, (bool,))
        _require_type("committed_at", self.committed_at, (int, float))
        for name, value in self.metrics.items():
            _require_type(f"metrics.{name}", value, (int, float))
        if not math.isfinite(self.committed_at):
            raise ValueError(f"committed_at is {self.committed_at}, not a time")
        if self.schema != SCHEMA:
            raise ValueError(f"schema is {self.schema}, this version reads and writes {SCHEMA}")
        if self.world_size < 1:
            raise ValueError("world_size is 0, a checkpoint has at least one writer")
        if self.checksum_algorithm != CHECKSUM_ALGORITHM:
            raise ValueError(
                f"checksum_algorithm is {self.checksum_algorithm!r}, only {CHECKSUM_ALGORITHM!r} "
                "can be verified"
            )
        # A checkpoint that names no file would verify by checking nothing.
        if not self.files:
            raise ValueError("files is empty, a checkpoint has at least one file")
        seen: dict[str, str] = {}
        for entry in self.files:
            # Names that differ in case alone are one file on some file systems.
            key = folded(entry.path)
            if key in seen:
                other = seen[key]
                what = "twice" if other == entry.path else f"and {other!r}, which can be one file"
                raise ValueError(f"files names {entry.path!r} {what}")
            seen[key] = entry.path

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return checkpoint_name(self.step, self.generation)

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.bytes for entry in self.files)

    def to_json(self) -> dict[str, Any]:
        """The document that is stored, without its checksum."""
        # Not asdict(): it copies deep, and the files of a large run are tens of thousands.
        plain: dict[str, Any] = {"schema": self.schema}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "files":
                plain["files"] = [entry.to_json() for entry in self.files]
            elif item.name == "skipped":
                plain["skipped"] = [asdict(skip) for skip in self.skipped]
            elif item.name != "schema":
                plain[item.name] = without_nonfinite(value)
        return plain

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Manifest:
        """Builds a manifest from its document; fields of later versions are left alone.

        Raises:
            ValueError: a field is missing or has a wrong type or value.
        """
        values = {}
        for item in fields(cls):
            if item.name in document:
                values[item.name] = document[item.name]
            elif item.name not in _ADDED:
                raise ValueError(f"field {item.name!r} is missing")
        _require_type("files", values["files"], (list,))
        values["files"] = tuple(_file_entry(entry) for entry in values["files"])
        _require_type("metrics", values["metrics"], (dict,))
        values["metrics"] = {k: _number(k, v) for k, v in values["metrics"].items()}
        if "skipped" in values:
            _require_type("skipped", values["skipped"], (list,))
            values["skipped"] = tuple(_skip(item) for item in values["skipped"])
        return cls(**values)


def _file_entry(item: object) -> FileEntry:
    if not isinstance(item, dict) or not {"path", "bytes", "checksum"} <= item.keys():
        raise ValueError("an item of files is not {path, bytes, checksum}")
    return FileEntry(item["path"], item["bytes"], item["checksum"], item.get("sha256"))


def _skip(item: object) -> Skip:
    if not isinstance(item, dict) or not {"from_step", "steps"} <= item.keys():
        raise ValueError("an item of skipped is not {from_step, steps}")
    return Skip(from_step=item["from_step"], steps=item["steps"])


def _number(name: str, value: object) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"metrics.{name} is {value!r}, must be a number")
    return value


def _require_type(name: str, value: object, types: tuple[type, ...]) -> None:
    # bool is an int in Python; in a manifest `true` is not a step.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(kind.__name__ for kind in types)
        raise ValueError(f"{name} is {value!r}, must be {expected}")


def _require_count(name: str, value: object) -> None:
    _require_type(name, value, (int,))
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} is {value}, must not be negative")
