"""`ray-ckpt report RUN --html FILE`: what the dashboard shows of a run, frozen into one file that needs nothing."""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from ray_ckpt.checkpoint.storing import without_nonfinite
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tiers.address import shown
from ray_ckpt.tiers.remote_records import pull_records
from ray_ckpt.view.page import frozen_page
from ray_ckpt.view.place import FolderRun, RemoteRun, open_run
from ray_ckpt.view.run_view import RunView

_DOUBT_S = 1.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    command.add_argument("--html", metavar="FILE", help="the file to write; - for standard output")


def command_report(args: argparse.Namespace) -> int:
    """`report RUN --html FILE`, or `--json`."""
    if not args.html and not args.json:
        raise ConfigError("say where to: --html FILE for a page, or --json for its data")
    run = open_run(args.run, args.storage)
    document = _document(run)
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    if args.html == "-":
        print(frozen_page(document))
    elif args.html:
        path = Path(args.html)
        _write(path, frozen_page(document))
        if not args.json:
            print(f"{path}: {run} as of now, one file to keep or to send")
    return 0


def _document(run: FolderRun | RemoteRun) -> dict[str, Any]:
    if isinstance(run, FolderRun) or run.folder is not None:
        assert run.folder is not None
        return _frozen(RunView(run.folder))
    with tempfile.TemporaryDirectory(prefix="ray-ckpt-") as place:
        folder = Path(place) / run.tier.run
        pull_records(run.tier, folder)
        document = _frozen(RunView(folder, remote=str(run.tier.where)))
        document["run"]["folder"] = shown(str(run.tier.where))
        return document


def _frozen(view: RunView) -> dict[str, Any]:
    view.update()
    if view.in_doubt:
        # What is not there may just be deleted, and the journal about to tell it.
        time.sleep(_DOUBT_S)
        view.update()
    document = {**view.detail(limit=None), "frozen_at": time.time()}
    return dict(without_nonfinite(document))


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written ({error.strerror})") from error
