"""Ends a test's cluster when the test process is gone, also when it was killed with SIGKILL.

Run as `python _guard.py NAME` by `LocalCluster`; it polls the owner that the cluster's record names.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster._end import end_if_orphaned
from cluster._state import Folders

_POLL_S = 1.0


def main(name: str) -> None:
    """Returns when the cluster has ended, by its owner or for want of one."""
    while Folders(name).load() is not None and not end_if_orphaned(name):
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1])
