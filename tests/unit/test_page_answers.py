"""The page and its answers: nothing is run that a user wrote, nothing is loaded, nothing is asked twice."""

from __future__ import annotations

import base64
import errno
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_page_data import story
from test_tracker_core import Run

from ray_ckpt import cli, ray_dashboard
from ray_ckpt.errors import ConfigError, StorageError
from ray_ckpt.tracker.journal import JOURNAL_NAME
from ray_ckpt.view import gallery as gallery_module
from ray_ckpt.view.answers import Answer, Desk
from ray_ckpt.view.gallery import Gallery
from ray_ckpt.view.page import Page, embedded, frozen_page, live_page, sign_in_page

NASTY = "</script><img src=x onerror=alert(1)>\u2028<!--"


@pytest.fixture(autouse=True)
def _find_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery_module, "FIND_EVERY_S", 0.0)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    story(Run(tmp_path / "runs" / "mine"))
    return tmp_path / "runs"


def body(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def only_run(desk: Desk) -> str:
    (run,) = body(desk.runs())["runs"]
    return str(run["id"])


def registered(storage: Path, name: str = "mine") -> dict[str, Any]:
    return {"run": name, "run_dir": str(storage / name), "remote": "", "actor": f"a:{name}"}


# ---- answers ----------------------------------------------------------------------------------------


def test_runs_of_a_folder_and_of_this_ray_are_listed_once(storage: Path, tmp_path: Path) -> None:
    story(Run(tmp_path / "other" / "mine"))
    desk = Desk(Gallery(lambda: [registered(storage)], str(storage)))
    (run,) = body(desk.runs())["runs"]
    assert (run["name"], run["registered"], run["actor"]) == ("mine", True, "a:mine")
    # Two runs of one name in two places are two.
    desk = Desk(Gallery(lambda: [registered(tmp_path / "other")], str(storage)))
    runs = body(desk.runs())["runs"]
    assert [run["name"] for run in runs] == ["mine", "mine"]
    assert len({run["id"] for run in runs}) == 2


def test_no_runs_is_an_answer_too(tmp_path: Path) -> None:
    assert body(Desk(Gallery()).runs())["runs"] == []
    (tmp_path / "not-a-run").mkdir()
    assert body(Desk(Gallery(storage=f"{tmp_path}:{tmp_path / 'none'}")).runs())["runs"] == []


def test_a_registered_run_that_cannot_be_seen_says_why(tmp_path: Path) -> None:
    (run,) = body(Desk(Gallery(lambda: [registered(tmp_path)])).runs())["runs"]
    assert run["health"] == "attention"
    assert "head node" in run["reasons"][0]


def test_a_cluster_that_does_not_answer_hides_no_run(storage: Path) -> None:
    answers: list[Any] = [[registered(storage)]]

    def ask() -> list[Any]:
        if not answers:
            raise StorageError("the runs of this Ray cannot be asked for")
        return answers.pop()

    desk = Desk(Gallery(ask))
    assert len(body(desk.runs())["runs"]) == 1
    again = body(desk.runs())
    assert (len(again["runs"]), len(again["problems"])) == (1, 1)


def test_what_has_not_changed_is_not_sent_again(storage: Path) -> None:
    desk = Desk(Gallery(storage=str(storage)))
    run_id = only_run(desk)
    first = desk.run(run_id, {})
    assert body(first)["schema"] == 1
    tag = first.headers["ETag"]
    assert desk.run(run_id, {}, tag).status == 304
    assert desk.run(run_id, {"offset": "1"}, tag).status == 200
    listed = desk.runs()
    assert desk.runs(listed.headers["ETag"]).status == 304
    with (storage / "mine" / JOURNAL_NAME).open("a") as file:
        file.write('{"time": 1.9e9, "generation": 2, "event": "finished", "step": 35}\n')
    assert body(desk.run(run_id, {}, tag))["run"]["state"] == "finished"
    assert desk.runs(listed.headers["ETag"]).status == 200


def test_rows_come_in_pages_newest_first(storage: Path) -> None:
    desk = Desk(Gallery(storage=str(storage)))
    run_id = only_run(desk)
    whole = body(desk.run(run_id, {}))["checkpoints"]
    steps = [row["step"] for row in whole["rows"]]
    assert steps == sorted(steps, reverse=True)
    assert whole["matching"] == whole["total"] == len(steps)
    pages = [
        body(desk.run(run_id, {"offset": str(o), "limit": "1"}))["checkpoints"]["rows"]
        for o in range(5)
    ]
    assert [row["step"] for page in pages for row in page] == steps
    pinned = body(desk.run(run_id, {"show": "pinned"}))["checkpoints"]
    assert ([row["step"] for row in pinned["rows"]], pinned["matching"]) == ([20], 1)


@pytest.mark.parametrize(
    "query", [{"offset": "-1"}, {"limit": "many"}, {"limit": "²"}, {"show": "x"}]
)
def test_a_wrong_query_is_named(storage: Path, query: dict[str, str]) -> None:
    desk = Desk(Gallery(storage=str(storage)))
    answer = desk.run(only_run(desk), query)
    assert answer.status == 400
    assert next(iter(query)) in json.loads(answer.body)["error"]


@pytest.mark.parametrize("run_id", ["", "..", "../mine", "mine", "/etc/passwd", NASTY])
def test_only_ids_that_were_listed_open_a_run(storage: Path, run_id: str) -> None:
    desk = Desk(Gallery(storage=str(storage)))
    only_run(desk)
    answer = desk.run(run_id, {})
    assert answer.status == 404
    assert answer.headers["Content-Type"].startswith("application/json")


def test_large_answers_are_packed_for_those_who_take_it(storage: Path) -> None:
    desk = Desk(Gallery(storage=str(storage)))
    run_id = only_run(desk)
    packed = desk.run(run_id, {}, packed=True)
    assert packed.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(packed.body))["run"]["name"] == "mine"


def test_a_loss_that_is_not_finite_is_still_json(storage: Path) -> None:
    with (storage / "mine" / "steps.jsonl").open("a") as file:
        line = {
            "step": 36,
            "generation": 2,
            "loss": float("nan"),
            "lr": float("inf"),
            "step_time_s": 0.5,
        }
        file.write(json.dumps(line) + "\n")
    desk = Desk(Gallery(storage=str(storage)))
    answer = desk.run(only_run(desk), {})
    found = json.loads(answer.body, parse_constant=lambda word: pytest.fail(word))
    assert (found["run"]["present"]["loss"], found["run"]["present"]["lr"]) == (None, "inf")


# ---- the page ---------------------------------------------------------------------------------------


class Scripts(HTMLParser):
    """The scripts, styles and addresses of a page, as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.links: list[str] = []
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag in ("script", "style"):
            self.found.append((tag, dict(attrs), ""))
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            tag, attrs, text = self.found[-1]
            self.found[-1] = (tag, attrs, text + data)


def parsed(html: str) -> Scripts:
    scripts = Scripts()
    scripts.feed(html)
    return scripts


@pytest.mark.parametrize(
    ("page", "links", "answer"),
    [
        (live_page(), ["#main", "./"], Desk.page),
        (sign_in_page(), ["../../"], Desk.sign_in),
    ],
)
def test_the_page_loads_nothing_and_lets_no_other_script_run(
    page: Page, links: list[str], answer: Callable[[Desk], Answer]
) -> None:
    scripts = parsed(page.html)
    assert scripts.links == links
    assert set(re.findall(r"https?://[^\s\"'`]+", page.html)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in page.html
    assert "url(" not in page.html
    for tag, attrs, text in scripts.found:
        if attrs.get("type") != "application/json":
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy
    assert "unsafe" not in page.policy
    assert page.policy in page.html
    assert page.policy in answer(Desk(Gallery())).headers["Content-Security-Policy"]


def test_the_script_makes_no_markup_of_texts() -> None:
    script = next(
        text for tag, attrs, text in parsed(live_page().html).found if tag == "script" and not attrs
    )
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
    ):
        assert way not in script


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.text() | st.integers() | st.booleans(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    )
)
def test_data_in_the_page_stays_data(value: Any) -> None:
    document = {"run": {"name": NASTY, "more": value}}
    text = embedded(document)
    assert "<" not in text
    assert json.loads(text) == document
    found = [
        text for _, attrs, text in parsed(frozen_page(document)).found if attrs.get("id") == "data"
    ]
    assert [json.loads(text) for text in found] == [document]


def test_a_report_holds_all_rows_and_is_one_file(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "incident.html"
    assert cli.main(["report", "mine", "--storage", str(storage), "--html", str(out)]) == 0
    scripts = parsed(out.read_text())
    data = json.loads(next(text for _, attrs, text in scripts.found if attrs.get("id") == "data"))
    assert data["run"]["name"] == "mine"
    assert len(data["checkpoints"]["rows"]) == data["checkpoints"]["total"] > 0
    assert data["frozen_at"] > 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["incident.html"]
    capsys.readouterr()
    assert cli.main(["report", "mine", "--storage", str(storage), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["counts"] == data["run"]["counts"]


def test_a_report_says_where_to_or_why_not(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "mine", "--storage", str(storage)]) == cli.EXIT_USAGE
    assert "--html" in capsys.readouterr().err
    nowhere = tmp_path / "none" / "x.html"
    assert (
        cli.main(["report", "mine", "--storage", str(storage), "--html", str(nowhere)])
        == cli.EXIT_FAULT
    )
    assert str(nowhere) in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here to read the script")
def test_the_script_is_one_that_engines_take(tmp_path: Path) -> None:
    for number, (_, attrs, text) in enumerate(parsed(live_page().html).found):
        if not attrs:
            path = tmp_path / f"{number}.js"
            path.write_text(text)
            if "use strict" in text:
                subprocess.run(["node", "--check", str(path)], check=True, timeout=60)


# ---- in Ray's dashboard -----------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site" / "ray" / "dashboard" / "modules"
    folder.mkdir(parents=True)
    monkeypatch.setattr(ray_dashboard, "_modules", lambda: (folder, ray_dashboard.READ_IN))
    monkeypatch.delenv(ray_dashboard.VARIABLE, raising=False)
    return folder


def test_the_page_is_put_in_and_taken_away_as_often_as_one_likes(
    modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action, there in [("status", False), ("enable", True), ("enable", True), ("status", True),
                          ("disable", False), ("disable", False)]:  # fmt: skip
        assert cli.main(["dashboard", action, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["enabled"] is there
        assert [path.name for path in modules.iterdir()] == (
            [ray_dashboard.SHIM_FOLDER] if there else []
        )
    ray_dashboard.enable()
    assert [path.name for path in (modules / ray_dashboard.SHIM_FOLDER).iterdir()] == [
        "__init__.py"
    ]


def test_a_file_of_another_version_is_told_and_replaced(modules: Path) -> None:
    ray_dashboard.enable()
    (modules / ray_dashboard.SHIM_FOLDER / "__init__.py").write_text("raise RuntimeError\n")
    assert ray_dashboard.status().outdated
    assert "enable it again" in ray_dashboard.status().words
    assert ray_dashboard.enable().enabled


def test_a_ray_that_cannot_be_written_is_named_with_the_way_out(
    modules: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert cli.main(["dashboard", "enable"]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert str(modules / ray_dashboard.SHIM_FOLDER) in said
    assert "Read-only file system" in said
    assert "environment that you may write to" in said
    assert ray_dashboard.enable_if_possible() is False  # a run starts all the same


def test_a_job_leaves_ray_alone_when_told_to(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ray_dashboard.VARIABLE, "0")
    assert ray_dashboard.enable_if_possible() is False
    assert not (modules / ray_dashboard.SHIM_FOLDER).exists()


def test_without_ray_there_is_nothing_to_put_it_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_dashboard, "_modules", lambda: (None, ""))
    with pytest.raises(ConfigError, match=r"ray\[default\]"):
        ray_dashboard.enable()
    assert not ray_dashboard.disable().enabled


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), ImportError("gone"), SystemExit(3), SyntaxError("x")]
)
def test_the_file_in_ray_never_raises(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "ray_ckpt.view.head_module":
                raise error

    monkeypatch.delitem(sys.modules, "ray_ckpt.view.head_module", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    exec(compile(ray_dashboard._shim(), "shim", "exec"), {"__name__": "shim"})
    assert "no page /checkpoints" in caplog.text
    assert type(error).__name__ in caplog.text


class Store:
    """The key-value store of a cluster, as the dashboard's client shows it."""

    def __init__(self, values: dict[bytes, bytes | None]) -> None:
        self._values = values

    def internal_kv_keys(self, prefix: bytes, namespace: bytes, timeout: float) -> list[bytes]:
        return [key for key in self._values if key.startswith(prefix)]

    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None:
        return self._values[key]


def test_what_no_run_registered_is_passed_over() -> None:
    record = {"run": "mine", "run_dir": "/x"}
    store = Store(
        {
            b"run:1": json.dumps(record).encode(),
            b"run:2": b"{",
            b"run:3": None,
            b"run:4": b"[]",
            b"a": b"{}",
        }
    )
    assert ray_dashboard.registered_runs(store) == [record]
    found = body(Desk(Gallery(lambda: [{}, {"run_dir": 3}, {"run": "x", "run_dir": ""}])).runs())
    assert found["runs"] == []


def test_a_store_that_fails_is_no_cluster_without_runs() -> None:
    class Failing(Store):
        def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None:
            raise RuntimeError("rpc")

    with pytest.raises(StorageError, match="cannot be asked"):
        ray_dashboard.registered_runs(Failing({b"run:1": b"{}"}))


def test_an_address_among_the_folders_is_told_and_without_its_keys() -> None:
    found = body(Desk(Gallery(storage="s3://KEY:SECRET@bucket/runs?secret_key=SECRET")).runs())
    assert "s3://bucket/runs" in found["problems"][0]
    assert "SECRET" not in json.dumps(found)
