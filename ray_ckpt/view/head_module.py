"""The page of checkpoints as a module of Ray's dashboard: its routes, and nothing that could hold the dashboard up.

Imported by the file that ``ray-ckpt dashboard enable`` puts below ``ray.dashboard.modules``, in the dashboard's process
and in the agents of all nodes, so everything else is imported with the first request. Requests go through the
dashboard's own checks, its token among them. Files are looked at in one thread of its own: storage that hangs costs
these answers, and nobody else's.

Read in Ray 2.60.0.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ray.dashboard.optional_deps import aiohttp
from ray.dashboard.optional_utils import DashboardHeadRouteTable
from ray.dashboard.utils import DashboardHeadModule

from ray_ckpt.ray_dashboard import PAGE_PATH, SIGN_IN_PATH, asks_for_token, tell_page

if TYPE_CHECKING:
    from ray_ckpt.view.answers import Answer, Desk

logger = logging.getLogger(__name__)

ANSWER_S = 15.0


class RayCkptCheckpoints(DashboardHeadModule):
    """``GET /checkpoints`` and ``GET /api/ray_ckpt/...``; read-only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray_ckpt")
        self._desk: Desk | None = None
        self._stuck: asyncio.Future[Any] | None = None

    async def run(self) -> None:
        """Tells this Ray where the page is; then nothing goes on between requests."""
        try:
            path = SIGN_IN_PATH if asks_for_token() else PAGE_PATH
            put = functools.partial(tell_page, self.gcs_client, path)
            await asyncio.get_running_loop().run_in_executor(self._thread, put)
        except Exception:  # the page is there all the same
            logger.warning("jobs are not told where the page of checkpoints is", exc_info=True)

    @staticmethod
    def is_minimal_module() -> bool:
        """It needs the web server of the whole dashboard."""
        return False

    @DashboardHeadRouteTable.get(PAGE_PATH)
    async def page(self, request: Any) -> Any:
        """The page."""
        return await self._answer(lambda desk: desk.page())

    # Without a token Ray lets nobody past but to the files of its own page, which ask for it. So does this one, and
    # holds nothing else.
    @DashboardHeadRouteTable.get(SIGN_IN_PATH)
    async def sign_in(self, request: Any) -> Any:
        """Asks for the token, and leads to the page."""
        return await self._answer(lambda desk: desk.sign_in())

    @DashboardHeadRouteTable.get("/api/ray_ckpt/runs")
    async def runs(self, request: Any) -> Any:
        """The list of runs."""
        seen, packed = _wishes(request)
        return await self._answer(lambda desk: desk.runs(seen, packed=packed))

    @DashboardHeadRouteTable.get("/api/ray_ckpt/runs/{id}")
    async def one(self, request: Any) -> Any:
        """One run."""
        seen, packed = _wishes(request)
        run_id, query = request.match_info["id"], dict(request.query)
        return await self._answer(lambda desk: desk.run(run_id, query, seen, packed=packed))

    async def _answer(self, ask: Callable[[Desk], Answer]) -> Any:
        if self._stuck is not None and not self._stuck.done():
            return _busy()  # a request more would only wait behind it
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._ask, ask)
        try:
            answer = await asyncio.wait_for(asyncio.shield(work), ANSWER_S)
        except asyncio.TimeoutError:
            self._stuck = work
            return _busy()
        return aiohttp.web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    def _ask(self, ask: Callable[[Desk], Answer]) -> Answer:
        if self._desk is None:
            from ray_ckpt.ray_dashboard import registered_runs
            from ray_ckpt.view.answers import Desk
            from ray_ckpt.view.gallery import Gallery

            storage = os.environ.get("RAY_CKPT_STORAGE", "")
            self._desk = Desk(Gallery(lambda: registered_runs(self.gcs_client), storage))
        return ask(self._desk)


def _wishes(request: Any) -> tuple[str, bool]:
    """The tag of what the asker has, and whether it takes gzip."""
    packed = "gzip" in request.headers.get("Accept-Encoding", "")
    return request.headers.get("If-None-Match", ""), packed


def _busy() -> Any:
    return aiohttp.web.json_response(
        {"error": "the storage of a run does not answer; try again later"}, status=503
    )
