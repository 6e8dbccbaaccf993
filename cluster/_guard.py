"""Ends a test's cluster when the test process is gone, also when it was killed with SIGKILL.

Run as `python _guard.py NAME` by `LocalCluster`; it polls the owner that the cluster's record names.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import _processes
from cluster._cluster import destroy
from cluster._state import Folders

_POLL_S = 1.0


def main(name: str) -> None:
    folders = Folders(name)
    while (record := folders.load()) is not None and record.owner is not None:
        if not _processes.is_alive(record.owner):
            with folders.lock():
                destroy(record)
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1])
