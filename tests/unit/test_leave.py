"""A node that leaves has its runs saved first, waits for nothing else, and leaves also when that fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_tracker_core import Run

from cluster import _spot
from cluster.leave import find_node, is_head, save_all
from ray_ckpt.errors import ConfigError, RayCkptError, StorageError


class Direct:
    """A tracker without Ray around it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.gone = False

    def call(self, method: str, **arguments: Any) -> Any:
        if self.gone:
            raise StorageError("the run's tracker is gone")
        return getattr(self.run.core, method)(**arguments)


class Leaving:
    """A node that leaves: `meanwhile` is what happens in each pause of its waiting."""

    def __init__(self, meanwhile: Callable[[int], None] = lambda turn: None) -> None:
        self.now, self.turn, self.meanwhile = 0.0, 0, meanwhile
        self.words: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.turn += 1
        self.meanwhile(self.turn)

    def save(
        self, trackers: dict[str, Direct], node: str | None, within_s: float = 10.0
    ) -> list[str]:
        return save_all(
            trackers,
            node,
            within_s,
            self.words.append,
            (RayCkptError,),
            clock=lambda: self.now,
            sleep=self.sleep,
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "demo")
    made.begin()  # on node-a
    made.train(10)
    made.save()
    made.train(5)
    return made


def test_a_run_holds_after_the_save_and_the_node_leaves_once_it_is_durable(run: Run) -> None:
    def train(turn: int) -> None:
        if turn == 1:
            run.save()  # one that was under way: steps have been made since
        if turn == 3:
            directive = run.train(1)
            assert directive.save_request  # a save at this step, and no step after it
            assert directive.hold_s == 10.0
            run.save(request=directive.save_request)

    node = Leaving(train)
    assert node.save({"demo": Direct(run)}, "node-a") == []
    assert node.turn == 3  # it waited for that and no longer
    assert run.core.status()["last_commit_step"] == 16
    assert node.words == ["run 'demo': step 16 is in the durable tier"]
    [asked] = run.journal("save_requested")
    assert "node-a is about to leave" in asked["reason"]


def test_a_run_without_workers_on_the_node_is_left_alone(run: Run) -> None:
    node = Leaving()
    assert node.save({"demo": Direct(run)}, "node-b") == []
    assert node.turn == 0
    assert run.journal("save_requested") == []


def test_with_the_head_all_runs_end_so_all_are_saved(run: Run) -> None:
    node = Leaving(lambda turn: run.save(request=1) and None)
    assert node.save({"demo": Direct(run)}, None) == []
    assert len(run.journal("save_requested")) == 1


def test_a_run_between_two_attempts_has_nothing_to_save(run: Run) -> None:
    run.core.interruption("node_loss", "gone")
    node = Leaving()
    assert node.save({"demo": Direct(run)}, "node-a") == []
    assert run.journal("save_requested") == []


def test_the_time_is_kept_whatever_a_run_does(run: Run) -> None:
    node = Leaving()  # it never saves: a step that takes longer, say
    assert node.save({"demo": Direct(run)}, "node-a", within_s=2.0) == ["demo"]
    assert node.now == pytest.approx(2.0, abs=0.3)
    assert "'demo'" in node.words[-1]
    assert "after 2 s" in node.words[-1]


def test_a_run_that_ends_does_not_keep_the_node_from_saving_another(
    run: Run, tmp_path: Path
) -> None:
    other = Run(tmp_path / "other")
    other.begin()
    other.train(3)
    ending, dead = Direct(run), Direct(run)
    dead.gone = True

    def meanwhile(turn: int) -> None:
        ending.gone = True
        if turn == 2:
            other.save(request=1)

    node = Leaving(meanwhile)
    trackers = {"dead": dead, "demo": ending, "other": Direct(other)}
    assert node.save(trackers, "node-a") == ["dead", "demo"]
    assert other.core.status()["last_commit_step"] == 3
    assert sum("tracker is gone" in line for line in node.words) == 2


NODES = [
    {
        "NodeID": "aa",
        "NodeName": "node0",
        "Alive": True,
        "Resources": {"node:__internal_head__": 1.0},
    },
    {"NodeID": "bb", "NodeName": "node1", "Alive": True, "Resources": {"CPU": 1.0}},
    {"NodeID": "cc", "NodeName": "node1", "Alive": False, "Resources": {}},
    {"NodeID": "dd", "NodeName": "node2", "Alive": False, "Resources": {}},
]


def test_a_node_is_found_by_name_or_id_if_it_lives() -> None:
    assert find_node(NODES, "bb") == find_node(NODES, "node1") == NODES[1]
    assert [is_head(find_node(NODES, name)) for name in ("node0", "node1")] == [True, False]
    for gone in ("node2", "dd", "cc", "node3"):
        with pytest.raises(ConfigError, match=f"--node {gone}: 0 living nodes .* node0 \\(aa\\)"):
            find_node(NODES, gone)


# ---- the notice of AWS ---------------------------------------------------------------------------


class Metadata(BaseHTTPRequestHandler):
    """The service of a machine: version 2, which wants a token."""

    said: tuple[int, bytes] = (404, b"")

    def do_PUT(self) -> None:
        self._answer(
            200, b"token-1" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else b""
        )

    def do_GET(self) -> None:
        right = self.headers["X-aws-ec2-metadata-token"] == "token-1"
        asked = self.path == "/latest/meta-data/spot/instance-action"
        self._answer(*(self.said if right and asked else (401, b"")))

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_notice_is_waited_for_and_trouble_is_said_once(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = json.dumps({"action": "terminate", "time": "2026-01-01T08:22:00Z"}).encode()
    answers = iter([(404, b""), (500, b""), (200, b"no json"), (404, b""), (200, notice)])

    def sleep(seconds: float) -> None:
        monkeypatch.setattr(Metadata, "said", next(answers))

    words: list[str] = []
    found = _spot.wait_for_notice(words.append, service, sleep)
    assert found == "AWS will terminate this machine at 2026-01-01T08:22:00Z"
    assert len(words) == 1
    assert next(answers, None) is None


def test_without_a_service_it_is_said_that_nothing_can_be_told() -> None:
    with pytest.raises(OSError, match="refused"):
        _spot.notice("http://127.0.0.1:9")
