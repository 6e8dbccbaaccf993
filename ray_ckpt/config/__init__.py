"""Every option of a run, with its unit and its rule.

Options are frozen dataclasses. A wrong value or combination is refused when it is built, with the name of
the option as it is written on the command line, the rule, and the way out.
"""

from ray_ckpt.config.elastic import ElasticConfig, GpuUse
from ray_ckpt.config.folders import absolute_folder
from ray_ckpt.config.guard import GuardConfig
from ray_ckpt.config.policy import PolicyConfig
from ray_ckpt.config.reading import FeedKind, ReadingConfig
from ray_ckpt.config.retention import RetentionConfig
from ray_ckpt.config.run import DEFAULT_HOME, Config, Parallel
from ray_ckpt.config.saving import SavingConfig, StagingMode
from ray_ckpt.config.tiers import TiersConfig

__all__ = [
    "DEFAULT_HOME",
    "Config",
    "ElasticConfig",
    "FeedKind",
    "GpuUse",
    "GuardConfig",
    "Parallel",
    "PolicyConfig",
    "ReadingConfig",
    "RetentionConfig",
    "SavingConfig",
    "StagingMode",
    "TiersConfig",
    "absolute_folder",
]
