"""A table file that the dashboard's Logs tab lists: one aligned line per event of the run."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_HEADER = f"{'time (UTC)':<20}{'attempt':>8}  {'event':<16} what\n"


class LogTable:
    """Appends lines to ``ray_ckpt-<run>.log``; does nothing when there is no folder for it."""

    def __init__(self, folder: Path | None, run: str) -> None:
        self._path = None if folder is None else folder / f"ray_ckpt-{run}.log"
        self._append(_HEADER, only_new=True)

    def write(self, event: dict[str, Any], line: str) -> None:
        """Adds the line of an event."""
        when = datetime.fromtimestamp(event["time"], tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        self._append(f"{when:<20}{event['generation']:>8}  {event['event']:<16} {line}\n")

    def _append(self, text: str, *, only_new: bool = False) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a") as file:
                if not (only_new and file.tell()):
                    file.write(text)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): the Logs tab will miss it", self._path, error
            )
            self._path = None
