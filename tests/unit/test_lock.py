"""A run has one driver at a time, however the one before ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_ckpt.errors import ConfigError
from ray_ckpt.tracker import lock
from ray_ckpt.tracker.lock import RunLock

HOLD = "import sys, time; from pathlib import Path; from ray_ckpt.tracker.lock import RunLock\n"
HOLD += "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


def test_a_second_holder_is_refused_and_told_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_POLL_S", 0.01)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        with pytest.raises(ConfigError, match=f'"pid": {holder.pid}'):
            RunLock(tmp_path / "run", wait_s=0.1)
        holder.send_signal(signal.SIGKILL)
        started = time.monotonic()
        RunLock(tmp_path / "run", wait_s=10).close()
        assert time.monotonic() - started < 5
    finally:
        holder.kill()
        holder.wait()
    RunLock(tmp_path / "run", wait_s=0).close()
