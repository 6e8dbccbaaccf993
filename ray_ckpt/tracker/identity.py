"""What decides the course of a run, and what of it may change while the run lives.

Kept in ``<run>/run.json`` from the first start. A resume with another value is refused by the name of the
option: the run would go on, on other data or in another order, and nobody would know. Some options may be
changed by saying so (``--change-at-resume``): they belong to a segment of the run, and ``run.json`` has the list of
its segments (:mod:`ray_ckpt.segment`). The tracker adds to it, when it is known where a segment starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ray_ckpt.checkpoint.listing import list_checkpoints, usable
from ray_ckpt.checkpoint.storing import write_atomically
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.segment import OPTIONS, Segment, differences

IDENTITY_NAME = "run.json"
SCHEMA = 2

_OFFER = '--change-at-resume "reason"'


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What ``run.json`` says.

    Attributes:
        fixed: option (as it is written on the command line) to value, for those that never change.
        segments: oldest first; at least one.
    """

    fixed: Mapping[str, Any]
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> RunRecord:
        """The record of a run that begins with these options."""
        plain = json.loads(json.dumps(dict(identity)))
        fixed = {name: value for name, value in plain.items() if name not in OPTIONS}
        options = {name: value for name, value in plain.items() if name in OPTIONS}
        return cls(fixed=fixed, segments=(Segment(options=options),))


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Digest of an identity, 32 hex digits."""
    return str(xxhash.xxh3_128(json.dumps(identity, sort_keys=True).encode()).hexdigest())


def check_identity(run_dir: Path, identity: Mapping[str, Any], change: str = "") -> str:
    """Compares with what the run is; the first start writes it down.

    Args:
        run_dir: the run's folder.
        identity: option (as it is written on the command line) to value, plain JSON values.
        change: why options of a segment may be others than before; empty: they may not.

    Returns:
        What is to be said: that the record of a run with checkpoints is not there, or about ``change`` when there is
        nothing to change; else nothing.

    Raises:
        ConfigError: a value differs from the run's and is not declared, or can never be changed; or the record is
            gone, and the newest checkpoint was made with other options.
        StorageError: the record cannot be read or written.
    """
    known, now = read_record(run_dir), RunRecord.of(identity)
    if known is None:
        notice = _check_lost(run_dir, identity, change)
        write_record(run_dir, now)
        return notice or (
            f"--change-at-resume: nothing is changed, {run_dir.name!r} is a new run"
            if change
            else ""
        )
    changed = check_change(run_dir, known, now, change)
    newest = known.segments[-1]
    if changed or not change:
        return ""
    return (
        f"--change-at-resume: nothing is changed, the run goes on in segment {newest.number} (since step "
        f"{newest.start_step})"
    )


def _check_lost(run_dir: Path, identity: Mapping[str, Any], change: str) -> str:
    """What is to be said of a run without its record that has checkpoints: those know a digest of their options.

    Raises:
        ConfigError: the options are others, and nobody says that they may be.
    """
    committed = usable(list_checkpoints(run_dir))
    if not committed or committed[0].manifest is None:
        return ""
    lost = f"{run_dir / IDENTITY_NAME} is not there, and {committed[0].folder.name} is"
    if committed[0].manifest.config_fingerprint == fingerprint(identity):
        return f"{lost}, made with the options of this start: the record is written anew, its older segments are not"
    if not change:
        raise ConfigError(
            f"{lost}, made with other options than those of this start; which ones, only the record tells. Put the "
            f"file back, or use the options of then; or, where the change is meant, add {_OFFER}."
        )
    return f"{lost}, made with other options: {change}"


def check_change(
    run_dir: Path, known: RunRecord, now: RunRecord, change: str
) -> dict[str, tuple[Any, Any]]:
    """What changes in the options of a segment: option to (old, new).

    Raises:
        ConfigError: a change that is not declared, or cannot be made.
    """
    newest = known.segments[-1]
    never = differences(known.fixed, now.fixed)
    changed = differences(newest.options, now.segments[0].options)
    if not never and (change or not changed):
        return changed
    since = "began with other options"
    if newest.number:
        since = f"has, since step {newest.start_step} (segment {newest.number}), other options"
    said = "; ".join(
        f"{k} was {old!r}, now {new!r}" for k, (old, new) in {**never, **changed}.items()
    )
    if never:
        fix = (
            "They decide its course. "
            f"{', '.join(never)} cannot be changed, with {_OFFER} neither: seed, exact mode, the model and "
            "the weights that it began with stay the same for the life of a run. Use the old values, or another "
            "--run name."
        )
    else:
        fix = (
            "They decide its course. Use the old values, or another --run name; or, where the change is meant, add "
            f"{_OFFER}: then a new segment starts at the checkpoint that the run resumes from."
        )
    raise ConfigError(f"run {run_dir.name!r} in {run_dir.parent} {since}: {said}. {fix}")


def read_record(run_dir: Path) -> RunRecord | None:
    """What a run is, None before its first start. Records without segments (schema 1) have one.

    Raises:
        StorageError: there is a record, and it cannot be read.
    """
    path = run_dir / IDENTITY_NAME
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise StorageError(
            f"{run_dir} cannot be written ({error.strerror}). --storage must be a folder, with no file in "
            "its way."
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror})") from error
    try:
        document = json.loads(text)
        schema = document["schema"]
        if schema == 1:
            return RunRecord.of(document["identity"])
        if isinstance(schema, int) and schema > SCHEMA:
            raise StorageError(
                f"{path} has the format {schema}, this version reads up to {SCHEMA}: use the version of ray_ckpt "
                "that wrote it."
            )
        segments = tuple(Segment.from_json(item) for item in document["segments"])
        if not segments:
            raise ValueError("it names no segment")
        return RunRecord(fixed=dict(document["fixed"]), segments=segments)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is damaged ({error}). It says what the run began with: restore it, or remove it if you "
            "are sure that the options are those of the run."
        ) from error


def write_record(run_dir: Path, record: RunRecord) -> None:
    """Puts a record in place, atomically.

    Raises:
        StorageError: the disk refused; a reader sees the old record or the new one.
    """
    document = {
        "schema": SCHEMA,
        "fixed": dict(record.fixed),
        "segments": [segment.to_json() for segment in record.segments],
    }
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{run_dir} cannot be written ({error.strerror}). --storage must be a folder with room, which "
            "this user may write to."
        ) from error
    write_atomically(run_dir / IDENTITY_NAME, json.dumps(document, indent=1).encode() + b"\n")
