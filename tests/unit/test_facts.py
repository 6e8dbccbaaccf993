"""What is refused before anything starts: a run whose checkpoints cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_catalog import config_of, make_data

from ray_ckpt import trainer
from ray_ckpt.checkpoint.names import MANIFEST_NAME, QUARANTINE_NAME
from ray_ckpt.config import Config, PolicyConfig
from ray_ckpt.errors import RestoreError
from ray_ckpt.facts import check_run, tracker_options
from ray_ckpt.options import run_main
from ray_ckpt.policy.belief import ScalePrior
from ray_ckpt.tracker.core import RunFacts, TrackerCore
from ray_ckpt.tracker.lock import LOCK_NAME


@pytest.fixture
def started(tmp_path) -> tuple[Config, RunFacts]:
    """A run with two checkpoints."""
    config = config_of(tmp_path, make_data(tmp_path / "data", 9))
    facts = check_run(config, {})
    core = TrackerCore(facts, tracker_options(config))
    for step in (3, 6):
        generation = core.begin_attempt(1, []).generation
        folder = config.run_dir / "checkpoints" / f"step-{step:08d}-g{generation}"
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"meta")
        save: dict[str, Any] = {
            "step": step,
            "samples": 6 * step,
            "tokens": 18 * step,
            "world_size": 1,
            "files": [{"path": ".metadata", "bytes": 4, "checksum": "0" * 32}],
            "stall_s": 0.1,
            "upload_s": 0.1,
            "metrics": {},
            "guard": {},
            "error": None,
            "bitwise_comparable": True,
        }
        assert core.commit(generation, save)
    return config, facts


def damage(config: Config, how: str, folder: Path) -> None:
    if how == "manifest":
        (folder / MANIFEST_NAME).write_bytes(b"{}")
    elif how == "quarantine":
        (folder / QUARANTINE_NAME).write_text('{"reason": "__0_0.distcp: checksum differs"}')
    else:
        (folder / MANIFEST_NAME).unlink()


@pytest.mark.parametrize("how", ["manifest", "quarantine", "gone"])
def test_a_run_that_cannot_be_restored_is_refused_before_a_cluster_starts(
    started, monkeypatch, capsys, how
):
    config, facts = started
    folders = sorted((config.run_dir / "checkpoints").iterdir())
    damage(config, how, folders[0])
    assert check_run(config, {}) == facts  # one is left
    damage(config, how, folders[1])

    def no_cluster(num_cpus: int) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(trainer, "cluster", no_cluster)
    before = {path: path.stat().st_size for path in config.run_dir.rglob("*")}
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: trainer.run(config, lambda config: None))
    assert ended.value.code == 1
    after = {path: path.stat().st_size for path in config.run_dir.rglob("*")}
    after.pop(config.run_dir / LOCK_NAME)  # nobody holds it any more
    assert after == before
    said = capsys.readouterr().err
    # The tracker would say the same.
    core = TrackerCore(facts, tracker_options(config))
    with pytest.raises(RestoreError, match="never starts from zero") as refused:
        core.begin_attempt(1, [])
    assert said == f"error: {refused.value}\n"


def test_a_new_run_and_one_that_never_saved_are_not_refused(tmp_path):
    config = config_of(tmp_path, make_data(tmp_path / "data", 9))
    facts = check_run(config, {})
    TrackerCore(facts, tracker_options(config)).begin_attempt(1, [])
    assert check_run(config, {}) == facts


def test_the_priors_of_the_options_are_those_of_the_tracker():
    policy = PolicyConfig(prior_mtbf_s=7200, prior_per_1000_worker_days=3.5, prior_weight=2)
    assert tracker_options(Config(policy=policy)).prior() == ScalePrior(
        job_mtbf_s=7200, per_1000_worker_days=3.5, weight=2
    )
