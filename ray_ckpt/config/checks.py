"""Rules that many options share; each names the option as it is written on the command line."""

from __future__ import annotations

import math
from typing import Any, get_args

from ray_ckpt.errors import ConfigError


def at_least(least: int, option: str, value: int) -> None:
    """Refuses a value below the least."""
    if not value >= least:  # so that NaN, which is not less either, is refused
        raise ConfigError(f"{option} {value}: must be at least {least}")


def more_than_0(option: str, value: float, unit: str = "") -> None:
    """Refuses a value that is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{option} {value}: must be more than 0{unit}, and finite")


def not_negative(option: str, value: float) -> None:
    """Refuses a value that is not a finite number, 0 or more."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{option} {value}: must be 0 or more, and finite")


def one_of(kind: Any, option: str, value: object) -> None:
    """Refuses a word that is not one of a ``Literal``."""
    # The command line knows the choices; a file or a program may bring any word.
    choices = get_args(kind)
    if value not in choices:
        raise ConfigError(f"{option} {value!r}: must be one of {', '.join(choices)}")


def flag(name: str) -> str:
    """A field's name as the command line has it."""
    return name.replace("_", "-")
