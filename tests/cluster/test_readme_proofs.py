"""The proofs of README.md, as they stand there. Long: each is a whole run, killed and started again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from readme import ROOT, block_of

from cluster._launch import without_ray

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("command", block_of("python jobs/prove.py"))
def test_it_proves_what_it_says(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, env=without_ray(os.environ) | {"HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    print(done.stdout[-6000:], done.stderr[-3000:])
    assert done.returncode == 0
