"""The page in a real dashboard: under its token, of runs that register, and never in its way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from making import tracker_of
from ray_copy import copy_ray

from cluster.local import LocalCluster, Settings
from ray_ckpt import ray_dashboard
from ray_ckpt.ray_dashboard import SHIM_FOLDER, _shim
from ray_ckpt.view.answers import Answer

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]

# A run as its driver makes it, without workers: a tracker, an attempt, and the end of it.
DRIVER = """
import sys, ray
from ray_ckpt.policy.decision import IntervalLimits
from ray_ckpt.tracker.actor import start_tracker
from ray_ckpt.tracker.core import RunFacts, TrackerOptions

ray.init(log_to_driver=False)
same = {"config_fingerprint": "c", "data_fingerprint": "d", "parallel": "ddp", "versions": {}}
facts = RunFacts(run="live", run_dir=sys.argv[1], **same)
tracker = start_tracker(facts, TrackerOptions(limits=IntervalLimits(), prior_mtbf_s=3600.0))
attempt = ray.get(tracker.begin_attempt.remote(3, ["a", "b", "c"]))
ray.get(tracker.restored.remote(attempt.generation, 0, 0.1, "", "no checkpoint yet"))
ray.get(tracker.steps.remote(attempt.generation, [{"step": 1, "loss": 2.5, "step_time_s": 0.5}]))
from ray_ckpt.ray_dashboard import page_path
print("ready", page_path(), flush=True)
sys.stdin.read()
ray.get(tracker.interruption.remote("user_stop", "</script> said the user"))
"""


def site(folder: Path, shim: str) -> Path:
    """A Ray whose dashboard has this file."""
    modules = copy_ray(folder)
    (modules / SHIM_FOLDER).mkdir()
    (modules / SHIM_FOLDER / "__init__.py").write_text(shim)
    return folder


def environment(*paths: Path) -> dict[str, str]:
    return {"PYTHONPATH": ":".join(map(str, paths))}


def tree(folder: Path) -> dict[str, bytes | str]:
    """All files of an installation, but for what Python keeps of its own beside them."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts and SHIM_FOLDER not in path.parts:
            continue
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = "folder" if path.is_dir() else path.read_bytes()
    return found


def sign_in_as_people_do(cluster: LocalCluster, token: str, profile: Path) -> None:
    """From the address that a job's log says, past the question for the token, to the page."""
    with Browser(profile) as browser:
        browser.open(f"{cluster.dashboard_url}{ray_dashboard.SIGN_IN_PATH}")
        for word, follows in (
            ("wrong", "document.body.innerText.includes('does not take this token')"),
            (token, "location.pathname === '/checkpoints'"),
        ):
            browser.wait("document.querySelector('#token')")
            browser.js(f"document.querySelector('#token').value = {json.dumps(word)}")
            browser.click("form button")
            browser.wait(follows)
        browser.wait_text("recorded")
        assert browser.errors == []


def get(cluster: LocalCluster, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(
        cluster.dashboard_url + path, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_runs_of_this_ray_are_shown_to_those_who_have_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = copy_ray(tmp_path / "site")
    before = tree(tmp_path / "site")
    monkeypatch.setattr(ray_dashboard, "_modules", lambda: (modules, ray_dashboard.READ_IN))
    monkeypatch.delenv(ray_dashboard.VARIABLE)  # a cluster puts the page in by itself
    recorded = tmp_path / "runs" / "recorded"
    core = tracker_of(recorded)
    core.begin_attempt(2, ["a"])
    core.interruption("node_loss", "node gpu-17 died, with rank 1")
    mine = environment(tmp_path / "site", ROOT)
    extra = mine | {"RAY_CKPT_STORAGE": str(recorded.parent)}
    settings = Settings(auth="token", extra_env=extra)
    with LocalCluster(nodes=1, cpus=1, settings=settings) as cluster:
        environ = cluster.client_environ()
        token = Path(environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
        bearer = f"Bearer {token}"
        for path in ("/checkpoints", "/api/ray_ckpt/runs", "/api/ray_ckpt/runs/x"):
            assert get(cluster, path)[0] == 401, path
            assert get(cluster, path, Authorization="Bearer wrong")[0] == 403, path
        # What asks for the token is there for everybody, as the dashboard's own page is, and says nothing of a run.
        status, _, page = get(cluster, ray_dashboard.SIGN_IN_PATH)
        assert status == 200
        assert b"recorded" not in page
        if CHROMIUM is not None:
            sign_in_as_people_do(cluster, token, tmp_path / "browser")
        status, headers, page = get(cluster, "/checkpoints", Authorization=bearer)
        assert status == 200
        assert b"<title>Checkpoints</title>" in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        # A browser that has signed in sends its cookie.
        cookie = f"ray-authentication-token={token}"
        status, _, listed = get(cluster, "/api/ray_ckpt/runs", Cookie=cookie)
        assert status == 200
        (run,) = json.loads(listed)["runs"]
        assert (run["name"], run["registered"]) == ("recorded", False)
        assert run["last_interruption"]["kind"] == "node_loss"

        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path / "elsewhere" / "live")],
            env=environ | mine,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdin is not None
        assert driver.stdout is not None
        try:
            # A job of this Ray knows where to send people who have no token yet.
            assert driver.stdout.readline().split() == ["ready", ray_dashboard.SIGN_IN_PATH]
            run = wait_for(cluster, bearer, "training")
            assert run["registered"]
            assert run["actor"] == "ray_ckpt.tracker:live"
            assert (run["present"]["step"], run["present"]["world_size"]) == (1, 3)
            path = f"/api/ray_ckpt/runs/{run['id']}"
            status, headers, detail = get(cluster, path, Authorization=bearer)
            assert status == 200
            assert [a["generation"] for a in json.loads(detail)["attempts"]] == [1]
            tag = headers["ETag"]
            assert get(cluster, path, Authorization=bearer, If_None_Match=tag)[0] in (200, 304)
        finally:
            driver.stdin.close()
            assert driver.wait(timeout=60) == 0
        # The run has ended, and this Ray still knows it.
        run = wait_for(cluster, bearer, "stopped")
        assert run["last_interruption"]["cause"] == "</script> said the user"
        assert run["health"] == "ok"
        assert get(cluster, "/api/ray_ckpt/runs/none", Authorization=bearer)[0] == 404
    # A Ray was started with the page, and ran: when the page is taken away, the installation is as it was.
    assert tree(tmp_path / "site") != before
    ray_dashboard.disable()
    assert tree(tmp_path / "site") == before


def wait_for(cluster: LocalCluster, bearer: str, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + 90
    while True:
        status, _, body = get(cluster, "/api/ray_ckpt/runs", Authorization=bearer)
        assert status == 200, body
        runs = {run["name"]: run for run in json.loads(body)["runs"]}
        if "live" in runs and runs["live"]["state"] == state:
            return runs["live"]  # type: ignore[no-any-return]
        assert time.monotonic() < deadline, runs
        time.sleep(0.5)


def test_a_package_that_cannot_be_loaded_costs_the_page_and_nothing_else(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "ray_ckpt"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('half an upgrade')\n")
    extra = environment(site(tmp_path / "site", _shim()), tmp_path / "broken")
    with LocalCluster(nodes=1, cpus=1, settings=Settings(extra_env=extra, page=False)) as cluster:
        assert get(cluster, "/checkpoints")[0] == 404
        assert get(cluster, "/api/version")[0] == 200
        # The agent of the node, which runs jobs, loads the same modules.
        job = cluster.submit([sys.executable, "-c", "print('works')"])
        assert cluster.wait_job(job, timeout_s=120) == "SUCCEEDED"


def test_storage_that_hangs_costs_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits for a limited time, and those behind it do not wait at all."""
    from ray_ckpt.view import head_module

    monkeypatch.setattr(head_module, "ANSWER_S", 0.2)
    module, hangs = head_module.RayCkptCheckpoints(None), threading.Event()
    done = Answer(body=b"{}")

    def slow(desk: Any) -> Answer:
        hangs.wait(30)
        return done

    async def ask() -> None:
        assert (await module._answer(slow)).status == 503
        began_s = time.monotonic()
        assert (await module._answer(lambda desk: done)).status == 503
        assert time.monotonic() - began_s < 0.1
        hangs.set()
        while (await module._answer(lambda desk: done)).status != 200:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(ask(), 30))
