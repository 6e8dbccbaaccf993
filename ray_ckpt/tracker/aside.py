"""Work that must not hold up whoever has other calls to answer: one job at a time, its result fetched later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

Job = Callable[[], Any]


class Aside(Protocol):
    """Runs one job at a time."""

    @property
    def busy(self) -> bool:
        """Whether a job runs, or its result waits to be taken."""
        ...

    def start(self, job: Job) -> None:
        """Runs a job; only when not busy."""
        ...

    def take(self) -> Any:
        """The result of the last job, or the exception that ended it; None when there is none (yet)."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits until there is a result to take."""
        ...


class Inline:
    """Runs a job where it is started; for programs that wait anyway, and for tests."""

    def __init__(self) -> None:
        self._result: Any = None

    @property
    def busy(self) -> bool:
        return self._result is not None

    def start(self, job: Job) -> None:
        self._result = _result_of(job)

    def take(self) -> Any:
        result, self._result = self._result, None
        return result

    def wait(self, timeout_s: float) -> None:
        pass


class Thread:
    """Runs jobs on a thread that ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: Any = None

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def start(self, job: Job) -> None:
        assert self._thread is None, "one job at a time"
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def take(self) -> Any:
        if self._thread is None or self._thread.is_alive():
            return None
        result, self._result, self._thread = self._result, None, None
        return result

    def wait(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, job: Job) -> None:
        self._result = _result_of(job)


def _result_of(job: Job) -> Any:
    try:
        return job()
    except Exception as error:  # noqa: BLE001 - told to whoever takes the result
        return error
