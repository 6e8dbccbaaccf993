"""The page as one file: markup, style and script put together, with nothing loaded from anywhere else.

Texts of users, such as names of runs and causes, are put in as text by the script, never as markup. A policy in the
page itself lets no other script run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

_DATA = "null"
_SCRIPTS = (
    "base.js",
    "sign_in.js",
    "charts.js",
    "incidents.js",
    "table.js",
    "run.js",
    "page.js",
)
_ENTER_SCRIPTS = ("base.js", "sign_in.js", "enter.js")


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and the content security policy that fits it."""

    html: str
    policy: str


@functools.cache
def live_page() -> Page:
    """The page that asks the dashboard for its data."""
    return _assembled(_DATA)


@functools.cache
def sign_in_page() -> Page:
    """The page that asks for the token of Ray's dashboard and then leads to the live one; there is no data in it."""
    return _assembled(_DATA, "sign_in.html", _ENTER_SCRIPTS)


def frozen_page(document: Mapping[str, Any]) -> str:
    """The page of one run with its data in it: one file to keep, or to attach to an incident.

    Args:
        document: what ``GET /api/ray_ckpt/runs/ID`` answers, with all rows, and ``frozen_at``, seconds since the epoch.
    """
    return _assembled(embedded(document)).html


def still_page(title: str, body: str, *styles: str) -> str:
    """A page that needs no script.

    Args:
        title: of it.
        body: markup; texts in it are escaped already.
        styles: names of the parts that it looks like.
    """
    style = "".join(map(_part, styles))
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1></header>\n<main>{body}</main>\n</body>\n</html>\n"
    )


def embedded(document: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element whatever its strings are: without "<" it cannot end it."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _assembled(data: str, page: str = "page.html", scripts: tuple[str, ...] = _SCRIPTS) -> Page:
    style = _part("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_part, scripts)) + "})();\n"
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "script": script, "data": data}
    html = _part(page)
    pieces = html.split("%%")
    # One pass: a text that was put in is not looked at again.
    return Page("".join(parts[piece] if n % 2 else piece for n, piece in enumerate(pieces)), policy)


def _part(name: str) -> str:
    folder = resources.files("ray_ckpt.view").joinpath("static")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
