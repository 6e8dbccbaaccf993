"""Options of which checkpoints are kept: ``--retention``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tyro.conf import UseAppendAction

from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers.retention import Mode
from ray_ckpt.tiers.rules import Rules


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionConfig:
    """Which checkpoints are kept: those that any rule keeps. The newest verified one and pinned ones always stay."""

    keep_newest: int = 5
    """So many of the newest; 0 keeps every checkpoint of the run."""
    keep_every_steps: int = 0
    """Also the first at or after each multiple of so many steps; 0 is off."""
    keep_every_s: float = 3600.0
    """Also one per so many seconds of wall time; 0 is off."""
    keep_best: int = 0
    """Also so many with the best value of a metric; 0 is off."""
    metric: str = "loss"
    """Which metric."""
    mode: Mode = "min"
    """Whether its lowest or its highest value is best."""
    keep_steps: UseAppendAction[tuple[int, ...]] = ()
    """Also the checkpoints of this step; repeatable."""
    quarantined: int = 3
    """How many checkpoints that were found bad stay as evidence, at least 1."""
    grace_s: float = 3600.0
    """How long files that an attempt never committed stay after the last of them was written, seconds."""

    def __post_init__(self) -> None:
        try:
            self.rules()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def rules(self) -> Rules:
        """What the tracker and `ray-ckpt gc` go by."""
        return Rules(**{field.name: getattr(self, field.name) for field in fields(self)})
