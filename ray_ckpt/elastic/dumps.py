"""What the processes of a hang were doing, in files: ``hangs/<time>-g3/rank-0007.txt`` below the run's folder.

Who answers tells its stacks itself (:mod:`ray_ckpt.elastic.whereabouts`). Who does not is looked at from outside, on
its node: by what the kernel says of it, and by ``py-spy``, which comes with Ray. Each look ends after a while, and
each file has a bounded size.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ray_ckpt.elastic.whereabouts import STACKS_BYTES, Look, cut

logger = logging.getLogger(__name__)

HANGS_DIR = "hangs"
KEPT = 20  # newest hangs whose files stay
SPY_S = 10.0  # that py-spy may take


def folder_of(run_dir: Path, time_s: float, generation: int) -> Path:
    """Where the files of a hang go; the names sort by time."""
    return (
        run_dir
        / HANGS_DIR
        / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(time_s))}-g{generation}"
    )


def write_dumps(folder: Path, texts: Mapping[int, str]) -> str:
    """Writes what each rank was doing; of the hangs before, the newest stay.

    Args:
        folder: of this hang.
        texts: by rank.

    Returns:
        What went wrong, in words; empty when all is there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, text in texts.items():
            (folder / f"rank-{rank:04d}.txt").write_text(cut(text, 2 * STACKS_BYTES))
        for old in sorted(path for path in folder.parent.iterdir() if path.is_dir())[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        # A disk that hangs may be why: what is known goes into the journal all the same.
        logger.warning("what the workers were doing could not be written: %s", error)
        return str(error)
    return ""


def text_of_look(rank: int, node: str, look: Look) -> str:
    """The file of a rank that answered."""
    where = look.where
    return (
        f"rank {rank} on node {node}: in {where.phase!r} of step {where.step} for {look.age_s:.1f} s, in the step for "
        f"{look.step_age_s:.1f} s, {where.left} passes to come after this one\n\n{look.stacks}"
    )


def text_of_silence(rank: int, node: str, pid: int, outside: str) -> str:
    """The file of a rank that did not answer."""
    return f"rank {rank} on node {node}, process {pid}: no answer\n\n{outside}"


def look_from_outside(pid: int, spy_s: float = SPY_S) -> str:
    """What can be seen of a process of this machine that does not answer; raises nothing.

    Args:
        pid: its number.
        spy_s: longest that py-spy may take, seconds.
    """
    return cut(f"{_kernel_says(pid)}\n{_spy_says(pid, spy_s)}", STACKS_BYTES)


def end_process(pid: int) -> bool:
    """Kills a worker of Ray on this machine; whether it was there."""
    try:
        # Ray's workers are named so; a number that another process has by now is left alone.
        if b"ray::" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def look_and_end(pid: int, *, look: bool, end: bool) -> str:
    """On the node of a process: looks at it from outside, or kills it, or both in this order."""
    text = look_from_outside(pid) if look else ""
    if end:
        text += f"\nkilled: {end_process(pid)}\n"
    return text


def _kernel_says(pid: int) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as error:
        return f"the kernel: {error.strerror}"
    wanted = ("Name", "State", "Threads", "VmRSS", "VmSwap")
    told = [" ".join(line.split()) for line in lines if line.split(":")[0] in wanted]
    for name in ("wchan", "stack"):
        try:
            told.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
        except OSError:
            continue  # needs rights that a container may not have
    return "the kernel: " + "; ".join(told)


def _spy_says(pid: int, spy_s: float) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    spy = str(beside) if beside.exists() else shutil.which("py-spy")
    if spy is None:
        return "py-spy is not installed on this node (it comes with ray[default])"
    # A process that is stopped cannot be paused once more: it is read as it is.
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=spy_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy: {error}"
    return f"py-spy dump --pid {pid}\n{done.stdout}{done.stderr}"
