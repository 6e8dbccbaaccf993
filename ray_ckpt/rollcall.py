"""Who came to a call of all ranks and who did not: asked only when waiting for the others has failed.

The methods of a session are calls of all ranks, and a rank that misses one leaves the others waiting. Nothing is sent
to find that out in a step that goes well. A wait that ends, because it took too long or because a peer's process is
gone, ends with an error of gloo or NCCL that names neither the call nor the rank. Then each rank that waited leaves
word in the store of the process group where it was, looks who else did, and who did not is who the others waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from ray_ckpt.errors import OutOfStepError

# All that wait have the same limit, and those whose peer died hear of it at once: word is there soon, or never.
GRACE_S = 2.0
_POLL_S = 0.05
_NAMED = 8  # ranks in a message; of a thousand nobody reads more
_SIGNS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out")


class RollCall:
    """Turns the end of a wait into an error that names the call and the ranks.

    Args:
        group: a process group of all ranks that lives as long as the calls.
        grace_s: how long the others have to leave word, seconds.
    """

    def __init__(self, group: dist.ProcessGroup, grace_s: float = GRACE_S) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._store, self._grace_s = group.get_group_store(), grace_s

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Context of a call in which ranks wait for each other.

        Args:
            call: its name, for messages, such as "step_end() of step 12".

        Raises:
            OutOfStepError: in place of the error of torch when the wait failed; all other errors pass.
        """
        started_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self.judge(error, call, started_s)
            raise

    def judge(self, error: RuntimeError, call: str, since_s: float) -> None:
        """Judges what a call of all ranks has raised; for calls of every step, where a context costs too much.

        Args:
            error: what it raised.
            call: its name, for messages.
            since_s: when it began, by the steady clock, seconds.

        Raises:
            OutOfStepError: the error says that the wait failed.
        """
        if isinstance(error, OutOfStepError) or not is_wait(error):
            return
        waited_s = time.monotonic() - since_s
        text = explain(self._rank, self._size, call, self._ask(call), waited_s, error)
        raise OutOfStepError(text) from error

    def _ask(self, call: str) -> dict[int, str]:
        """Where the ranks are that left word, this one among them."""
        found = {self._rank: call}
        # The store may be gone with the process that kept it, and then it does not answer.
        asking = threading.Thread(target=self._collect, args=(call, found), daemon=True)
        asking.start()
        asking.join(self._grace_s + 1.0)
        return dict(found)

    def _collect(self, call: str, found: dict[int, str]) -> None:
        deadline = time.monotonic() + self._grace_s
        pause_s = _POLL_S * (1 + self._size // 32)  # all ranks ask one store about each other
        try:
            self._store.set(f"waits/{self._rank}", call)
            while len(found) < self._size and time.monotonic() < deadline:
                for rank in range(self._size):
                    key = f"waits/{rank}"
                    if rank not in found and self._store.check([key]):
                        found[rank] = self._store.get(key).decode()
                time.sleep(pause_s)
        except (RuntimeError, OSError):
            return  # it says what is known so far


def is_wait(error: BaseException) -> bool:
    """Whether an error of torch says that waiting for another rank has failed."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)


def explain(
    rank: int,
    world_size: int,
    call: str,
    places: Mapping[int, str],
    waited_s: float,
    error: BaseException,
) -> str:
    """The error in words.

    Args:
        rank: that tells.
        world_size: number of ranks.
        call: where it waited.
        places: where the ranks are that left word.
        waited_s: how long, seconds.
        error: of torch.
    """
    missing = sorted(set(range(world_size)) - set(places))
    elsewhere = {r: place for r, place in sorted(places.items()) if place != call}
    late = "Timed out" in str(error) or "timeout" in str(error).lower()
    parts = [f"{call}: rank {rank} waited {waited_s:.1f} s for the others"]
    if missing:
        words = "did not come" if late else "did not come, and a process is gone"
        parts.append(f"{_ranks(missing)} {words}")
    for place in dict.fromkeys(elsewhere.values()):
        ranks = [r for r, there in elsewhere.items() if there == place]
        parts.append(f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} in {place}")
    if not missing and not elsewhere:
        parts.append("all of them wait here too, so it is the network between them that failed")
    first = " ".join(str(error).split())[:160]
    return (
        f"{'; '.join(parts)}. Every rank calls the same methods of the session in the same order, once for each step: "
        f"look for a condition on the rank, or for an error of {_ranks(missing or list(elsewhere) or [rank])} "
        f"further up. ({type(error).__name__}: {first})"
    )


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"
