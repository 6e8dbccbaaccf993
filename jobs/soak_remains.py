"""What a soak has left behind: processes, files, shared memory, threads.

A machine has others on it, so that a new file is not ours by being new. Ours is what carries a mark: the name of the
cluster or of a folder of ours in its path, its command line or its environment, or the number of a process of ours in
its name (as torch and Python name shared memory).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from soak_judge import Finding

PLACES = (Path("/tmp"), Path("/dev/shm"))
_DEPTH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What there is at one moment.

    Attributes:
        processes: process id and start time, in clock ticks, to its command line, folder and environment in one text.
        files: paths below the places where files are left, the upper levels of them.
        threads: names of the threads of this process.
    """

    processes: Mapping[tuple[int, int], str]
    files: frozenset[str]
    threads: tuple[str, ...]


def look() -> Scene:
    """The scene just now."""
    return Scene(
        processes=dict(_processes()),
        files=frozenset(path for place in PLACES for path in _paths(place, _DEPTH)),
        threads=tuple(sorted(thread.name for thread in threading.enumerate())),
    )


def ours(scene: Scene, marks: Collection[str]) -> set[tuple[int, int]]:
    """The processes of a scene that carry one of the marks."""
    return {key for key, text in scene.processes.items() if any(mark in text for mark in marks)}


def left_behind(
    before: Scene,
    after: Scene,
    marks: Collection[str],
    seen: Collection[tuple[int, int]],
    kept: Collection[str] = (),
) -> list[Finding]:
    """What is there after a soak, was not there before it, and is its own.

    Args:
        before: before its cluster was started.
        after: when all of it is meant to be gone.
        marks: words by which things of ours are recognised.
        seen: all processes that were ever seen to be of the cluster, whatever they call themselves by now.
        kept: paths that are meant to stay, with what is below them.
    """
    found = []
    for key in sorted(
        (set(seen) | ours(after, marks)) & after.processes.keys() - before.processes.keys()
    ):
        text = f"{key[0]}: {after.processes[key][:200]}"
        found.append(Finding(rule="no process is left behind", text=text))
    numbers = {str(pid) for pid, _ in seen}
    for path in sorted(after.files - before.files):
        stays = any(path == keep or path.startswith(f"{keep}/") for keep in kept)
        numbered = numbers & set(re.findall(r"\d+", Path(path).name))
        if not stays and (numbered or any(mark in path for mark in marks)):
            memory = path.startswith("/dev/shm/")
            what = "no shared memory is left behind" if memory else "no file is left behind"
            found.append(Finding(rule=what, text=path))
    threads = list(after.threads)
    for name in before.threads:
        if name in threads:
            threads.remove(name)
    return found + [Finding(rule="no thread is left behind", text=name) for name in threads]


def _processes() -> Iterator[tuple[tuple[int, int], str]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            fields = stat[stat.rindex(")") + 2 :].split()
            if fields[0] in "ZX":
                continue
            command, variables = (
                (entry / name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
                for name in ("cmdline", "environ")
            )
            yield (int(entry.name), int(fields[19])), f"{command} {_folder(entry)} {variables}"
        except OSError:
            continue  # it has just ended, or is somebody else's


def _folder(entry: Path) -> str:
    try:
        return str((entry / "cwd").readlink())
    except OSError:
        return ""


def _paths(folder: Path, depth: int) -> Iterator[str]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        yield str(entry)
        if depth > 1 and entry.is_dir() and not entry.is_symlink():
            yield from _paths(entry, depth - 1)
