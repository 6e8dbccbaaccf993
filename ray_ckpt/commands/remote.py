"""`ray-ckpt gc` for a run on an object store.

A store has no lock that would show whether a driver is at work, so whoever deletes by hand says that there is none
(``--no-driver``). What was deleted goes into no journal: the one on the store is a copy of the run's.
"""

from __future__ import annotations

from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers.collect import Gate
from ray_ckpt.tiers.remote_house import RemoteRound
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tracker.rollback import passed
from ray_ckpt.view.place import RemoteRun


def remote_round(run: RemoteRun, rules: Rules, *, no_driver: bool, delete: bool) -> RemoteRound:
    """What a round of `gc` goes by.

    Args:
        run: the run.
        rules: which checkpoints are kept.
        no_driver: whether the user says that nobody drives the run.
        delete: whether it deletes.

    Raises:
        ConfigError: it is to delete, and somebody may drive the run.
    """
    if delete and not no_driver:
        raise ConfigError(
            f"{run} is on an object store, which does not show whether a driver is at work. Nothing was deleted: a run "
            "that is driven deletes by its own rules after each save. Say --no-driver if you are sure that there is "
            "none; gc --dry-run says what the rules keep."
        )
    memory = run.records[0].memory
    generation = max([memory.generation, *(entry.generation for entry in run.entries())])
    tier = run.tier

    def newest() -> int:
        # What is new on the store since tells of a driver, whatever was said.
        return max([generation, *(entry.generation for entry in tier.entries())])

    return RemoteRound(
        tier=tier,
        rules=rules,
        generation=generation,
        newest_generation=newest,
        # What nobody drives can have no save in flight: whatever was not committed never will be.
        present_generation=generation + 1 if no_driver else generation,
        verified=set(memory.verified),
        in_use={},
        read_back=tier.verify if delete else None,
        gate=Gate(),
        passed=passed(memory.left),
        delete=delete,
    )
