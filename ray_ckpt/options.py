"""From a dataclass tree to a command line: flags, dotted names, and ``--config FILE.toml``.

The flags and their help come from the dataclass (through ``tyro``): the sentence under a field is its help.
A TOML file sets defaults; flags win over it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from ray_ckpt.errors import ConfigError, RayCkptError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def parse(cls: type[T], args: Sequence[str] | None = None) -> T:
    """Options from the command line.

    Raises:
        ConfigError: an unknown key or a wrong value; SystemExit 2 for an unknown flag.
    """
    argv = list(sys.argv[1:] if args is None else args)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    known, rest = early.parse_known_args(argv)
    default = cls() if known.config is None else load_toml(cls, Path(known.config))
    about = f"{cls.__doc__ or ''}\n\n--config FILE.toml sets any option below; flags win over it."
    return tyro.cli(cls, args=rest, default=default, description=about)


def load_toml(cls: type[T], path: Path) -> T:
    """Options from a TOML file; tables are the nested options, and ``-`` and ``_`` are the same.

    Raises:
        ConfigError: the file cannot be read, or has a key that is no option.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not TOML ({error})") from error
    return _fill(cls(), values, f"--config {path}", "")


def _fill(default: T, values: Mapping[str, Any], where: str, prefix: str) -> T:
    assert is_dataclass(default)
    assert not isinstance(default, type)
    known = {field.name: getattr(default, field.name) for field in fields(default)}
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {prefix}{near[0]!s}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: {prefix}{key} is not an option; {hint}")
        now = known[name]
        if is_dataclass(now):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where}: {prefix}{key} is a group of options: write [{prefix}{key}]"
                )
            value = _fill(now, value, where, f"{prefix}{key}.")
        elif isinstance(now, float) and type(value) is int:
            value = float(value)
        elif type(value) is not type(now):
            raise ConfigError(
                f"{where}: {prefix}{key} = {value!r} must be of type {type(now).__name__}, like {now!r}"
            )
        changes[name] = value
    return replace(default, **changes)


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Runs a program: mistakes of the user end with one message and exit code 2, the rest with 1."""
    try:
        code = main() or 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except RayCkptError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    sys.exit(code)
