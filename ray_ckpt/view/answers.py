"""What the page and its scripts are answered: paths in, bytes out; no web server in here.

====================================  ============================================================
``GET /checkpoints``                  the page
``GET /static/ray_ckpt/checkpoints``  asks for the token of the dashboard, and leads to the page
``GET /api/ray_ckpt/runs``            the list of runs
``GET /api/ray_ckpt/runs/ID``         one run; ``?offset=&limit=&show=`` choose the rows of its table
====================================  ============================================================

Answers carry an ``ETag`` that changes when their content does; a request with ``If-None-Match`` is answered 304 while
it has not.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_ckpt.checkpoint.storing import without_nonfinite
from ray_ckpt.view.gallery import Gallery
from ray_ckpt.view.page import Page, live_page, sign_in_page
from ray_ckpt.view.shelf_rows import SHOWS

RUNS_PATH = "/api/ray_ckpt/runs"
MOST_ROWS = 1000
_COMPRESS_ABOVE = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A response.

    Attributes:
        status: of HTTP.
        body: as it is sent.
        headers: of it.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Desk:
    """Answers requests, one at a time: it follows files, and is slow when storage is.

    Args:
        gallery: the runs.
    """

    def __init__(self, gallery: Gallery) -> None:
        self._gallery = gallery
        self._epoch = secrets.token_hex(4)  # versions count from 0 in each process

    def runs(self, seen: str = "", *, packed: bool = False) -> Answer:
        """The list of runs.

        Args:
            seen: the tag of the answer that the asker has.
            packed: whether it takes gzip.
        """
        body = _encoded(self._gallery.list())
        return self._answer(body, hashlib.sha256(body).hexdigest()[:16], seen, packed)

    def run(
        self, run_id: str, query: Mapping[str, str], seen: str = "", *, packed: bool = False
    ) -> Answer:
        """One run."""
        try:
            offset = _count(query, "offset", 0, 10**9)
            limit = _count(query, "limit", 50, MOST_ROWS)
            show = query.get("show", "all")
            if show not in SHOWS:
                raise ValueError(f"show={show!r}: one of {', '.join(SHOWS)}")
        except ValueError as error:
            return _error(400, str(error))
        view = self._gallery.open(run_id)
        if view is None:
            return _error(404, f"no run {run_id!r}; GET {RUNS_PATH} lists them")
        version = f"{run_id}-{view.version}-{offset}-{limit}-{show}-{view.behind_bytes}"
        tag = self._tag(version)
        if tag == seen:
            return Answer(status=304, headers=_headers(tag))
        document = view.detail(offset=offset, limit=limit, show=show)
        return self._answer(_encoded(document), version, seen, packed)

    def page(self) -> Answer:
        """The page."""
        return self._html(live_page())

    def sign_in(self) -> Answer:
        """What asks for the token of the dashboard."""
        return self._html(sign_in_page())

    def _html(self, page: Page) -> Answer:
        return Answer(
            body=page.html.encode(),
            headers={
                "Content-Type": "text/html; charset=utf-8",
                "Content-Security-Policy": f"{page.policy}; frame-ancestors 'self'",
                "Cache-Control": "no-cache",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
            },
        )

    def _tag(self, version: str) -> str:
        return f'"{self._epoch}-{version}"'

    def _answer(self, body: bytes, version: str, seen: str, packed: bool) -> Answer:
        tag = self._tag(version)
        if tag == seen:
            return Answer(status=304, headers=_headers(tag))
        headers = _headers(tag)
        if packed and len(body) > _COMPRESS_ABOVE:
            body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1), "gzip"
        return Answer(body=body, headers=headers)


def _encoded(document: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except (
        ValueError
    ):  # a loss that is not finite, somewhere: rare, and looking for it first is slow
        plain = without_nonfinite(document)
        return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()


def _headers(tag: str) -> dict[str, str]:
    return {
        "Content-Type": "application/json; charset=utf-8",
        "ETag": tag,
        "Cache-Control": "no-cache",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }


def _error(status: int, message: str) -> Answer:
    body = json.dumps({"error": message}).encode()
    headers = {"Content-Type": "application/json; charset=utf-8", "Cache-Control": "no-store"}
    return Answer(status=status, body=body, headers=headers)


def _count(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueError(f"{name}={text!r}: a whole number from 0 to {most}")
    return min(int(text), most)
