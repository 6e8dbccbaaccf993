"""What somebody sees who follows a job in a browser: from its log to the page, a node that dies, a pin.

The pictures of it go to ``$RAY_CKPT_PICTURES``, when that is set, to be looked at.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from ray_copy import copy_ray
from worlds import make_data

from cluster.local import LocalCluster, Settings
from ray_ckpt import ray_dashboard

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no chromium here (Debian: apt-get install chromium)"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
NEWEST = "document.querySelector('#rows button')?.dataset.name"
SAFE = (
    "[...document.querySelectorAll('#rows tr')].find(row => row.innerText.includes('\u25cf committed'))"
    "?.querySelector('button').dataset.name"
)
# Anything that is wider than the window, and is not in a box of its own that scrolls.
TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"


def sign_in(browser: Browser, token: str) -> None:
    """Enters a token, as a person does."""
    browser.wait("document.querySelector('#token')")
    browser.js("document.querySelector('#token').value = ''")
    browser.js("document.querySelector('#token').focus()")
    browser.call("Input.insertText", text=token)
    browser.click("form button")


def pictures(browser: Browser, folder: Path, name: str) -> None:
    """Takes the page as it is at a desk and on a phone, in light and dark; none may be wider than its window."""
    for width, height, phone in ((1280, 900, False), (390, 844, True)):
        browser.size(width, height, phone=phone)
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            time.sleep(0.4)  # charts are drawn when their box has its size
            browser.shot(folder / f"{name}-{width}-{scheme}.png")
            assert browser.js(TOO_WIDE) <= 0, f"{name} is wider than {width} pixels"


@pytest.mark.slow
def test_a_job_is_followed_from_its_log_through_the_death_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.environ.get("RAY_CKPT_PICTURES", tmp_path))
    modules = copy_ray(tmp_path / "site")
    monkeypatch.setattr(ray_dashboard, "_modules", lambda: (modules, ray_dashboard.READ_IN))
    monkeypatch.delenv(ray_dashboard.VARIABLE, raising=False)
    data, storage = tmp_path / "data", tmp_path / "runs"
    make_data(data, [64] * 60, seq_len=33, vocab=257)
    extra = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
    settings = Settings(auth="token", extra_env=extra)
    with LocalCluster(3, 1, settings=settings) as cluster, Browser(tmp_path / "browser") as browser:
        environ = cluster.client_environ()
        job = cluster.submit(
            [
                *(sys.executable, "jobs/pretrain.py", "--run", "seen", "--workers", "1:3"),
                *("--storage", str(storage), "--data", str(data), "--steps", "1000000"),
                *("--global-batch", "16", "--micro-batch", "2", "--seq-len", "33"),
                *("--policy.interval-steps", "20", "--elastic.resize-check-s", "5"),
            ],
            working_dir=ROOT,
        )

        def until(found: Callable[[str], re.Match[str] | None], what: str) -> re.Match[str]:
            deadline = time.monotonic() + 120
            while (match := found(cluster.job_logs(job))) is None:
                assert time.monotonic() < deadline, f"no {what}\n{cluster.job_logs(job)[-4000:]}"
                time.sleep(0.5)
            return match

        # From the log to the page, past the token.
        address = until(lambda log: re.search(r"^checkpoints (http://\S+)$", log, re.M), "address")
        browser.size(1280, 900)
        browser.open(address[1])
        browser.wait_text("This Ray asks for its token")
        pictures(browser, folder, "token")
        browser.size(1280, 900)
        sign_in(browser, "not-the-token")
        browser.wait_text("Ray does not take this token")
        sign_in(browser, Path(environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip())
        browser.wait("location.pathname === '/checkpoints'")

        # The only run is open. A checkpoint appears without a reload: the page is the same document throughout.
        browser.wait_text("seen", 60)
        browser.js("window.stays = 'the same document'")
        first = browser.wait(NEWEST, 300)
        newer = browser.wait(f"{NEWEST} !== {first!r} && {NEWEST}", 120)
        assert newer > first
        fact = "[...document.querySelectorAll('dl.facts div')].find(d => d.innerText.startsWith('workers'))?.innerText"
        browser.wait(f"/\\b3$/.test({fact})", 120)
        pictures(browser, folder, "training")
        browser.size(1280, 900)

        # A node dies: the interruption is there with its cause, and the number of workers.
        cluster.kill("node1")
        browser.wait_text("node_loss", 180)
        tile = "[...document.querySelectorAll('.tile')].find(t => t.innerText.includes('last interruption'))?.innerText"
        browser.wait(f"/node node1 died/.test({tile})", 60)
        browser.wait(f"/\\b2$/.test({fact})", 240)
        browser.wait(f"/ cost|▲ node_loss/.test({tile})", 60)
        assert "3 to 2" in browser.text or "2 workers" in browser.js("document.body.textContent")

        # A pin.
        pinned = browser.wait(SAFE)
        step = int(pinned.split("-")[1])
        done = subprocess.run(
            [sys.executable, "-m", "ray_ckpt", "pin", str(storage / "seen"), str(step), "--reason", "in the paper"],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        browser.js("document.querySelector('#show').value = 'pinned'")
        browser.js("document.querySelector('#show').dispatchEvent(new Event('change'))")
        browser.wait(f"{NEWEST} === {pinned!r}", 30)
        browser.wait_text("\u2691 pinned")
        browser.click("#rows button")
        browser.wait_text("in the paper")
        pictures(browser, folder, "pinned")
        assert browser.js("window.stays") == "the same document"
        assert browser.errors == []
        # Who is no longer signed in is asked again, on the page itself, which goes on where it was.
        browser.call("Network.clearBrowserCookies")
        browser.wait_text("This Ray asks for its token")
        sign_in(browser, Path(environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip())
        browser.wait("document.querySelector('#link').textContent === 'live'")
        assert browser.js("window.stays") == "the same document"
