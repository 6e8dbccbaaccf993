"""All runs that the page knows: those that registered with this Ray, and those in the folders it was told of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.names import CHECKPOINTS_DIR
from ray_ckpt.errors import StorageError
from ray_ckpt.tiers.address import is_uri, shown
from ray_ckpt.tracker.journal import JOURNAL_NAME
from ray_ckpt.view.run_view import RunView

MOST_RUNS = 200
FIND_EVERY_S = 5.0
LIST_BUDGET_S = 0.1
RUN_BUDGET_S = 0.06

Registered = Callable[[], Iterable[Mapping[str, Any]]]


class Gallery:
    """The runs, each followed by a :class:`RunView` of its own.

    Args:
        registered: records of the runs of this Ray: ``run``, ``run_dir``, ``remote``, ``actor``, ``registered_at``.
        storage: folders of runs, as in ``$RAY_CKPT_STORAGE``: one, or several with ``:`` between them.
    """

    def __init__(self, registered: Registered = lambda: (), storage: str = "") -> None:
        self._registered, self._storage = registered, storage
        self._views: dict[str, RunView] = {}
        self._records: dict[str, Mapping[str, Any]] = {}
        self._found_at: float | None = None
        self._turn = 0
        self.problems: list[str] = []
        self.left_out = 0

    def find(self) -> None:
        """Looks for runs again, when it is time."""
        now_s = time.monotonic()
        if self._found_at is not None and now_s - self._found_at < FIND_EVERY_S:
            return
        self._found_at = now_s
        self.problems = []
        found: dict[Path, Mapping[str, Any]] = {}
        for folder in self._folders():
            found[folder] = {}
        for record in self._ask():
            if isinstance(record.get("run_dir"), str) and record["run_dir"]:
                found[Path(record["run_dir"])] = record
        views, records = {}, {}
        for folder, record in found.items():
            name = str(record.get("run") or folder.name)
            view = RunView(folder, name=name, remote=str(record.get("remote") or ""))
            view = self._views.get(view.id, view)
            views[view.id], records[view.id] = view, record
        self._views, self._records = views, records

    def _ask(self) -> list[Mapping[str, Any]]:
        try:
            return list(self._registered())
        except StorageError as error:
            self.problems.append(str(error))
            return [record for record in self._records.values() if record]  # as it was

    def _folders(self) -> list[Path]:
        """Folders of runs below the storages, the newest first, a limited number."""
        runs: list[tuple[float, Path]] = []
        for storage in self._storages():
            try:
                with os.scandir(storage) as items:
                    for item in items:
                        age = _written(Path(item.path))
                        if age is not None:
                            runs.append((age, Path(item.path)))
            except FileNotFoundError:
                continue
            except OSError as error:
                self.problems.append(f"{storage} cannot be listed ({error.strerror})")
                known = (view.folder for view in self._views.values())
                runs += [(0.0, folder) for folder in known if folder.parent == storage]
        runs.sort(reverse=True)
        self.left_out = max(0, len(runs) - MOST_RUNS)
        return [path for _, path in runs[:MOST_RUNS]]

    def _storages(self) -> list[Path]:
        text = self._storage.strip()
        if is_uri(text):
            self.problems.append(
                f"{shown(text)} is on an object store: only folders are looked through"
            )
            return []
        return [Path(part).expanduser() for part in text.split(os.pathsep) if part]

    def list(self) -> dict[str, Any]:
        """The list of runs; those that still have much to read are filled in by later calls."""
        self.find()
        order = list(self._views.values())
        until = time.monotonic() + LIST_BUDGET_S
        # In turn, and where the time ends the next call goes on: storage may be slow, and runs many.
        for count in range(len(order)):
            left_s = until - time.monotonic()
            if count and left_s <= 0:
                break
            order[self._turn % len(order)].update(max(0.0, left_s))
            self._turn = (self._turn + 1) % len(order)
        runs = [self._line(view) for view in order if view.is_there or self._records[view.id]]
        runs.sort(key=_order)
        return {
            "schema": 1,
            "runs": runs,
            "left_out": self.left_out,
            "problems": self.problems,
            "storage": [str(path) for path in self._storages()],
        }

    def _line(self, view: RunView) -> dict[str, Any]:
        record = self._records[view.id]
        line = view.summary()
        if not view.is_there:
            line["reasons"] = [
                f"{view.folder} cannot be seen from the head node, or has nothing yet: a run that is to be shown "
                "needs a storage that the head node sees"
            ]
            line["health"] = "attention"
        return {**line, "registered": bool(record), "actor": record.get("actor")}

    def open(self, run_id: str) -> RunView | None:
        """A run by its id, looked at anew; None when there is none."""
        self.find()
        view = self._views.get(run_id)
        if view is not None:
            view.update(RUN_BUDGET_S)
        return view


def _written(folder: Path) -> float | None:
    """When the journal of a run was written last; None for what is no run."""
    for mark in (JOURNAL_NAME, CHECKPOINTS_DIR):
        try:
            return (folder / mark).stat().st_mtime
        except OSError:
            continue
    return None


_LIVELY = {
    "training": 0,
    "restarting": 0,
    "new": 0,
    "reading": 0,
    "lost": 1,
    "stopped": 1,
    "finished": 2,
}


def _order(line: Mapping[str, Any]) -> tuple[int, float, str]:
    return _LIVELY[line["state"]], -float(line["present"]["last_time"] or 0.0), line["name"]
