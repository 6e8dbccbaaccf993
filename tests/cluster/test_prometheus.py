"""A real Prometheus beside a real run: what the board asks for is there at every scrape, and an alert fires."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from board import FOREIGN, GRAFANA, PANELS, selectors
from worlds import make_data

from cluster._launch import Settings, free_port, without_ray
from cluster._state import Folders
from cluster.local import LocalCluster
from ray_ckpt.view.metric_names import METRICS, PREFIX, RUN_TAG

PROMETHEUS = shutil.which("prometheus")
PRETRAIN = Path(__file__).resolve().parents[2] / "jobs" / "pretrain.py"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        PROMETHEUS is None,
        reason="there is no prometheus here (Debian: apt-get install prometheus)",
    ),
]

# Ray forgets a gauge after two reports: a gauge that is not set again and again does not get far.
REPORT_MS = 5000
# As long as the time of all tests allows; RAY_CKPT_WATCH_S=300 watches for five minutes.
WATCH_S = int(os.environ.get("RAY_CKPT_WATCH_S", "20"))
# There only when it happened.
SOMETIMES = {
    "ckpt_last_drill_ok",
    "ckpt_restore_seconds",
    "ckpt_restart_seconds",
    "ckpt_ended_total",
}


class Prometheus:
    """A Prometheus that scrapes a Ray, each second."""

    def __init__(self, folder: Path, targets: Path) -> None:
        folder.mkdir()
        rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())
        for rule in rules["groups"][0]["rules"]:
            rule["for"] = "0s"
        (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "alerts.yaml")],
            "scrape_configs": [
                {
                    "job_name": "ray",
                    "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._port, self._log = free_port(), folder / "log"
        assert PROMETHEUS is not None
        self.process = subprocess.Popen(
            [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{self._port}"],
            stdout=self._log.open("wb"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The vector that a query gives now; none while Prometheus starts."""
        url = (
            f"http://127.0.0.1:{self._port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])
        except urllib.error.URLError:
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            return []

    def number(self, query: str) -> float:
        """What a query gives that has one value; 0 for none."""
        return sum(float(each["value"][1]) for each in self.ask(query))

    def firing(self, run: str) -> set[str]:
        found = self.ask(f'ALERTS{{alertstate="firing", {RUN_TAG}="{run}"}}')
        return {each["metric"]["alertname"] for each in found}


@pytest.fixture
def ray() -> Iterator[LocalCluster]:
    quick = {"RAY_metrics_report_interval_ms": str(REPORT_MS), "RAY_worker_niceness": "0"}
    with LocalCluster(1, 2, settings=Settings(extra_env=quick)) as made:
        yield made


@pytest.fixture
def prometheus(ray: LocalCluster, tmp_path: Path) -> Iterator[Prometheus]:
    made = Prometheus(
        tmp_path / "prometheus",
        Folders(ray.name).node("node0") / "prom_metrics_service_discovery.json",
    )
    yield made
    made.process.terminate()
    made.process.wait()


def start(ray: LocalCluster, tmp_path: Path, run: str, *more: str) -> subprocess.Popen[bytes]:
    data = tmp_path / "rows"
    if not data.exists():
        make_data(data, [64] * 40, seq_len=33, vocab=257)
    command = [
        sys.executable,
        str(PRETRAIN),
        "--run",
        run,
        "--storage",
        str(tmp_path),
        "--data",
        str(data),
    ]
    command += ["--global-batch", "8", "--micro-batch", "4", "--seq-len", "33", "--workers", "1"]
    command += ["--model.dim", "32", "--model.num-layers", "2", *more]
    return subprocess.Popen(
        command,
        env=without_ray(os.environ) | ray.env(),
        stdout=(tmp_path / f"{run}.log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_until(holds: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


def required() -> set[str]:
    """Series of the board that every run has from its first commit on."""
    shown = {
        base for panel in PANELS for t in panel["targets"] for base, _, _ in selectors(t["expr"])
    }
    return {
        f"{PREFIX}{name}{'_bucket' if METRICS[name].kind == 'histogram' else ''}"
        for name in shown - SOMETIMES
    }


def test_the_board_has_data_at_every_scrape_and_a_run_that_dies_is_told(
    ray: LocalCluster, prometheus: Prometheus, tmp_path: Path
) -> None:
    long = start(ray, tmp_path, "long", "--steps", "1000000", "--policy.interval-steps", "20")
    short = start(ray, tmp_path, "short", "--steps", "40", "--policy.interval-steps", "20")

    def log(run: str) -> str:
        return (tmp_path / f"{run}.log").read_text()[-3000:]

    def missing() -> set[str]:
        there = {each["metric"]["__name__"] for each in prometheus.ask(f'{{{RUN_TAG}="long"}}')}
        return required() - there

    try:
        wait_until(lambda: not missing(), 180, lambda: f"{missing()} did not come\n{log('long')}")
        assert short.wait(timeout=180) == 0, log("short")
        began = time.monotonic()
        while time.monotonic() - began < WATCH_S:
            time.sleep(1)
        window = f"[{WATCH_S - 2}s]"
        scrapes = prometheus.number(f'max(count_over_time(up{{job="ray"}}{window}))')
        assert scrapes >= 0.8 * WATCH_S
        # A series with fewer samples than the others has vanished meanwhile. All of them vanish together, for a moment,
        # when a busy machine has the tracker's report come later than two periods: that is Ray's rule.
        least = {
            name: prometheus.number(f'min(count_over_time({name}{{{RUN_TAG}="long"}}{window}))')
            for name in sorted(required())
        }
        most = max(least.values())
        assert most >= 0.5 * scrapes, f"of {scrapes:g} scrapes {most:g} had the run"
        short_of = {name: count for name, count in least.items() if count < most - 1}
        assert not short_of, f"of {scrapes:g} scrapes, and {len(least)} metrics: {short_of}"
        # Each query of the board has an answer. Ray Train tells its own metric once, with the same name of the run.
        for panel in PANELS:
            for query in (target["expr"] for target in panel["targets"]):
                if SOMETIMES.isdisjoint(base for base, _, _ in selectors(query)):
                    asked = query.replace("$run", "long").replace("$window", f"{WATCH_S}s")
                    asked = (
                        f"last_over_time(({asked})[10m:1s])"
                        if any(name in query for name in FOREIGN)
                        else asked
                    )
                    assert prometheus.ask(asked), f"{panel['title']}: {asked}"
        # Tracker and board count the same things.
        journal = [
            json.loads(line)
            for line in (tmp_path / "long" / "journal.jsonl").read_text().splitlines()
        ]
        commits = sum(event["event"] == "commit" for event in journal)
        told = prometheus.number(f'max(ray_ckpt_commits_total{{{RUN_TAG}="long", tier="durable"}})')
        assert 0 < told <= commits
        assert prometheus.firing("long") == set()
        assert prometheus.firing("short") == set(), "it has finished"
        os.killpg(long.pid, signal.SIGKILL)
        wait_until(
            lambda: "RayCkptRunGone" in prometheus.firing("long"), 60, lambda: "nobody was told"
        )
        assert prometheus.firing("short") == set()
    finally:
        for process in (long, short):
            process.kill()
            process.wait()
