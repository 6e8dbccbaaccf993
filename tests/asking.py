"""The command line beside a cluster, as a person calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.local import LocalCluster

ROOT = Path(__file__).resolve().parents[1]


def ask(cluster: LocalCluster, *words: str, more: Mapping[str, str] | None = None) -> Any:
    """What `ray-ckpt` with these words prints as JSON; ``more`` is for its environment."""
    done = subprocess.run(
        [sys.executable, "-m", "ray_ckpt", *words, "--json"],
        env={**cluster.client_environ(), **(more or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)
