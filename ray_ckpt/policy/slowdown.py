"""How much an upload in the background slows the steps beside it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

# Fewer steps say nothing against the noise of their times.
FEWEST = 5
# Steps compared, of each sort; those of a long time ago may have had another pace.
_COMPARED = 400
# Steps kept from one save to the next: so many after the one and before the other.
_AT_EITHER_END = 2000


def slowdown(beside_s: Sequence[float], alone_s: Sequence[float]) -> float | None:
    """Share of the time of an upload that training loses.

    By medians: one step that waits for something else must not count. A difference within the noise (two standard
    errors of the difference of the medians, from the median deviations) counts as none: half of all differences
    that mean nothing would make saving look dear, and none of them makes it look cheap.

    Args:
        beside_s: times of steps during uploads, seconds.
        alone_s: times of other steps of the same attempt, seconds.

    Returns:
        A share, 0 or more and less than 1; None with too few steps to tell.
    """
    if len(beside_s) < FEWEST or len(alone_s) < FEWEST:
        return None
    beside, alone = median(beside_s), median(alone_s)
    noise = math.hypot(_standard_error(beside_s, beside), _standard_error(alone_s, alone))
    if beside - alone <= 2 * noise:
        return 0.0
    return 1 - alone / beside


def _standard_error(values: Sequence[float], middle: float) -> float:
    # For normal noise: the deviation is 1.4826 median deviations, and a median 1.2533 times as unsure as a mean.
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))


class UploadCompany:
    """Tells the steps beside uploads from the others, as a run goes on.

    A save is told when its upload is over, and the last steps are told late; so the steps after a save are sorted
    when the next one is told.
    """

    def __init__(self) -> None:
        self.slowdown = 0.0
        self._since_s: list[float] = []
        self._upload_s = 0.0
        self._beside_s: deque[float] = deque(maxlen=_COMPARED)
        self._alone_s: deque[float] = deque(maxlen=_COMPARED)

    def begin_attempt(self) -> None:
        """Forgets the times of another number of workers; the share stays until there is another."""
        self._since_s.clear()
        self._upload_s = 0.0
        self._beside_s.clear()
        self._alone_s.clear()

    def steps(self, times_s: Iterable[float]) -> None:
        """Takes the times of steps, in order, seconds."""
        self._since_s.extend(times_s)
        if len(self._since_s) > 4 * _AT_EITHER_END:
            del self._since_s[_AT_EITHER_END:-_AT_EITHER_END]

    def saved(self, steps_since: int, upload_s: float) -> None:
        """Takes the end of a save.

        Args:
            steps_since: steps told since the one that was saved.
            upload_s: of that save, seconds.
        """
        cut = max(0, len(self._since_s) - max(0, steps_since))
        passed_s = 0.0
        for k, step_s in enumerate(self._since_s[:cut]):
            passed_s += step_s
            if k == 0:
                continue  # it may hold a part of the stall
            (self._beside_s if passed_s <= self._upload_s else self._alone_s).append(step_s)
        del self._since_s[:cut]
        self._upload_s = upload_s
        found = slowdown(self._beside_s, self._alone_s)
        self.slowdown = self.slowdown if found is None else found
