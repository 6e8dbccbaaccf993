"""Submits jobs to a cluster and waits for them, over HTTP: the caller does not become a Ray client."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_POLL_S = 0.5


class Jobs:
    """The job server of one cluster.

    Args:
        url: Its dashboard.
        token: Authentication token; empty when the cluster asks for none.
    """

    def __init__(self, url: str, token: str) -> None:
        from ray.job_submission import JobSubmissionClient  # seconds of import, so only when used

        headers = {"Authorization": f"Bearer {token}"} if token else None
        self._client: Any = JobSubmissionClient(url, headers=headers)

    def submit(
        self, entrypoint: Sequence[str], working_dir: Path | None, env: Mapping[str, str] | None
    ) -> str:
        runtime_env: dict[str, Any] = {"env_vars": dict(env or {})}
        if working_dir is not None:
            runtime_env["working_dir"] = str(working_dir)
        job_id = self._client.submit_job(entrypoint=shlex.join(entrypoint), runtime_env=runtime_env)
        return str(job_id)

    def status(self, job_id: str) -> str:
        return str(self._client.get_job_status(job_id).value)

    def logs(self, job_id: str) -> str:
        return str(self._client.get_job_logs(job_id))

    def wait(self, job_id: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while (status := self.status(job_id)) not in _ENDED:
            if time.monotonic() > deadline:
                tail = "\n".join(self.logs(job_id).splitlines()[-20:])
                raise TimeoutError(
                    f"job {job_id} is still {status} after {timeout_s:g} s; its log ends:\n{tail}"
                )
            time.sleep(_POLL_S)
        return status
