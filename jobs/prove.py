"""Proves that a run that is killed, resized and stopped is the run that was left alone.

    python jobs/prove.py --exact --script "4x10 kill 2x7 kill 3x5 stop 1x2"     same bits on any number of workers
    python jobs/prove.py --script same                                          same bits on the same number
    python jobs/prove.py --exact --break all                                    planted faults must be found

By default each phase runs in plain processes that are killed with SIGKILL; ``--cluster`` runs it as a job on a
many-node Ray cluster on this machine, where workers and nodes die, nodes join, and the driver is stopped.
Exit code 0 only if the runs are identical (with ``--break``: only if the fault was found where it must show).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from model import ModelConfig
from pretrain import PretrainConfig, make_data, train

import ray_ckpt
from ray_ckpt.config import PolicyConfig
from ray_ckpt.options import parse, run_main
from ray_ckpt.prove import Runner, prove
from ray_ckpt.prove.plant import FAULTS
from ray_ckpt.prove.processes import run_phases


@dataclass(frozen=True, kw_only=True, slots=True)
class ProveConfig(PretrainConfig):
    """Proves that a resumed run is the run that was never interrupted."""

    script: str = "same"
    """Workers x steps, and events between: kill, resize, stop. "same" is killed once and goes on as it was."""
    fault: Annotated[str, tyro.conf.arg(name="break")] = ""
    """Plant a fault in the resumed attempts: rng, data-order, scheduler, optimizer, batch,
    sample-skip, or all of them one after the other."""
    cluster: bool = False
    """Run on a many-node Ray cluster on this machine instead of plain processes."""
    json: str = ""
    """File for the report as JSON."""
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(dim=32, num_layers=2, dropout=0.1)
    )
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(interval_steps=4))


def main() -> int:
    """Runs the proof and tells its outcome."""
    config = ray_ckpt.resolve(parse(ProveConfig))
    data = Path(config.sources[0].path)
    if len(config.sources) == 1 and (not data.is_dir() or not any(data.iterdir())):
        make_data(config)
    runner: Runner = run_phases
    if config.cluster:
        from prove_cluster import run_on_cluster

        runner = run_on_cluster
    faults = list(FAULTS) if config.fault == "all" else [config.fault]
    reports = []
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        for fault in faults:
            report = prove(
                replace(config, storage=folder),
                train,
                script=config.script,
                fault=fault,
                runner=runner,
                reuse=True,
            )
            print(report.text(), flush=True)
            reports.append(report)
    if config.json:
        found = [report.to_json() for report in reports]
        Path(config.json).write_text(json.dumps(found if len(found) > 1 else found[0], indent=1))
    good = all(report.fault_found if report.fault else report.identical for report in reports)
    return 0 if good else 1


if __name__ == "__main__":
    run_main(main)
