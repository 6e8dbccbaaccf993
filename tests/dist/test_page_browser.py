"""The page in a browser, where there is one: it draws what it is told, and takes no text for markup."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from making import tracker_of

from ray_ckpt import cli
from ray_ckpt.tracker.departures import Drain
from ray_ckpt.view.answers import RUNS_PATH, Answer, Desk
from ray_ckpt.view.gallery import Gallery

BROWSER = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
NASTY = "</script><img src=x onerror=document.title='taken'>"
NAME = "<b>run & co"

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium here"),
]


class Drawn(HTMLParser):
    """What a browser has made of a page: its elements, their ids, and the text that is seen."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids |= {str(value) for name, value in attrs if name == "id"}
        self._hidden = tag in ("script", "style", "noscript")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data


def drawn(url: str, profile: Path) -> Drawn:
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
         "--virtual-time-budget=5000", "--dump-dom", url],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return Drawn(done.stdout)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    core = tracker_of(tmp_path / "runs" / NAME)
    core.begin_attempt(3, ["a", "b", "c"])
    core.restored(1, 0, 0.5, "", "no checkpoint yet")
    lines = [
        {"step": n, "loss": 5 / n, "step_time_s": 0.5, "time": 1.7e9 + n} for n in range(1, 40)
    ]
    core.steps(1, lines)
    core.hang(
        step=39, quiet_s=305.0, usual_s=0.5, suspects=[1], nodes=["b"], names=[NASTY],
        reason="rank 1 is behind " + NASTY,
        where={f"all-reduce {NASTY}": [0, 2], "backward of step 40": [1]}, dumps="hangs/x-g1",
    )  # fmt: skip
    core.draining([Drain(node="b", name=NASTY, deadline=time.time() + 3600.0)])
    core.steps(1, [{"step": 40, "loss": 0.1, "step_time_s": 0.5, "time": 1.7e9 + 40}])
    core.interruption("node_loss", NASTY)
    return tmp_path / "runs"


@pytest.fixture
def live(storage: Path) -> Iterator[str]:
    """The address of a server that answers as the dashboard does."""
    desk = Desk(Gallery(storage=str(storage)))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            seen, query = (
                self.headers.get("If-None-Match", ""),
                dict(urllib.parse.parse_qsl(url.query)),
            )
            run_id = urllib.parse.unquote(url.path.rpartition("/")[2])
            answers: dict[str, Callable[[], Answer]] = {
                "/proxy/checkpoints": desk.page,
                f"/proxy{RUNS_PATH}": lambda: desk.runs(seen),
                f"/proxy{RUNS_PATH}/{urllib.parse.quote(run_id)}": lambda: desk.run(
                    run_id, query, seen
                ),
            }
            answer = answers.get(url.path, lambda: Answer(status=404))()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *args: object) -> None:
            pass

    # One after another, as the one thread of the dashboard's module does.
    lock = threading.Lock()
    handle = Handler.do_GET

    def in_turn(self: Handler) -> None:
        with lock:
            handle(self)

    Handler.do_GET = in_turn  # type: ignore[method-assign]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/proxy/checkpoints"
    server.shutdown()


def check(page: Drawn) -> None:
    """The run is drawn in all its parts, and what its user wrote is text."""
    parts = {
        f"part-{name}"
        for name in (
            *("title", "tiles", "facts", "charts", "goodput"),
            *("alerts", "incidents", "table", "story"),
        )
    }
    assert parts <= page.ids
    assert page.tags.count("svg") == 2
    assert NAME in page.text
    assert NASTY in page.text
    assert "img" not in page.tags
    assert "b" not in page.tags
    assert "taken" not in page.text.split("Checkpoints", 1)[0]  # the title of the page
    assert "object HTML" not in page.text
    said = " ".join(
        page.text.split("Nodes, hangs and sizes", 1)[1].split("checkpoints", 1)[0].split()
    )
    assert f"node {NASTY} will be taken away: " in said
    assert "lost. Deadline: " in said
    assert "ranks 0, 2: all-reduce" in said
    assert "/hangs/x-g1" in said
    assert "Limits: the same failure may come 3 times in a row at the same step" in said


def test_a_report_is_drawn_from_a_file(storage: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert cli.main(["report", NAME, "--storage", str(storage), "--html", str(out)]) == 0
    page = drawn(out.as_uri(), tmp_path / "profile")
    check(page)
    assert "a report, not live" in page.text


def test_the_only_run_is_opened_by_itself_also_behind_a_prefix(live: str, tmp_path: Path) -> None:
    page = drawn(live, tmp_path / "profile")
    check(page)
    assert "live" in page.text


def test_no_runs_are_told_with_what_to_do(tmp_path: Path, live: str, storage: Path) -> None:
    shutil.rmtree(storage / NAME)
    page = drawn(live, tmp_path / "profile")
    assert "No runs yet" in page.text
    assert "RAY_CKPT_STORAGE" in page.text
