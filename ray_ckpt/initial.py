"""The weights that a new run begins with, and the rule that they are the same until its first checkpoint.

From the first checkpoint on they are part of it, and ``--init-from`` is ignored: the file may be gone.
"""

from __future__ import annotations

from pathlib import Path

from ray_ckpt.config import Config
from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers.durable import durable_entries
from ray_ckpt.tracker.identity import read_record

INIT_FROM = "--init-from (fingerprint of its content)"


def initial_weights(config: Config) -> str:
    """Fingerprint of the weights that a run begins with; empty when it draws its own.

    Raises:
        ConfigError: the file is not there.
        StorageError: it cannot be read.
    """
    if any(entry.committed for entry in durable_entries(config.tiers.stack(), config.run_dir)):
        if config.init_from:
            print(
                f"run {config.run!r} has checkpoints and goes on from them: --init-from is ignored"
            )
        return _recorded(config) or ""
    if not config.init_from:
        return ""
    from ray_ckpt.state.weights import require_safetensors, weights_fingerprint

    require_safetensors()
    return weights_fingerprint(Path(config.init_from))


def check_unchanged(config: Config) -> None:
    """Refuses weights that are not those the run is on record with; for workers, before they load them.

    Raises:
        ConfigError: the content is another one.
    """
    from ray_ckpt.state.weights import weights_fingerprint

    recorded = _recorded(config)
    now = weights_fingerprint(Path(config.init_from))
    if recorded not in (None, now):
        raise ConfigError(
            f"--init-from {config.init_from}: the run began with weights of fingerprint {recorded!r}, now it is "
            f"{now!r}. Bring the old ones back, or use another --run name."
        )


def _recorded(config: Config) -> str | None:
    """Fingerprint that the run is on record with; None where there is no record of it."""
    record = read_record(config.run_dir)
    # Of the whole run, not of a segment: nothing that is declared at a resume changes how it began.
    return None if record is None else record.fixed.get(INIT_FROM)
