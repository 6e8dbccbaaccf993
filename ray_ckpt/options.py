"""From a dataclass tree to a command line: flags, dotted names, and ``--config FILE.toml``.

The flags and their help come from the dataclass (through ``tyro``): the sentence under a field is its help.
A TOML file sets defaults; flags win over it. Both are read before anything is checked: a file may say the half
of a combination that only makes sense with the flags.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

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
    known, flags = early.parse_known_args(argv)
    default = cls()
    if known.config is None:
        return _checked(default, _read_flags(_unchecked(default), flags))
    path = Path(known.config)
    said = _read_flags(_read_toml(_unchecked(default), path), flags)
    try:
        return _checked(default, said)
    except ConfigError as error:
        # Flags that are wrong by themselves are not the file's fault: told as if there were none.
        _checked(default, _read_flags(_unchecked(default), flags))
        raise ConfigError(f"--config {path}: {error}") from error


def load_toml(cls: type[T], path: Path) -> T:
    """Options from a TOML file; tables are the nested options, and ``-`` and ``_`` are the same.

    Raises:
        ConfigError: the file cannot be read, has a key that is no option, or a wrong value.
    """
    default = cls()
    said = _read_toml(_unchecked(default), path)
    try:
        return _checked(default, said)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error


def _unchecked(options: T) -> T:
    """The same options, groups included, as objects that take any value."""
    values = _values(options)
    groups = {name: _unchecked(value) for name, value in values.items() if is_dataclass(value)}
    kinds = tuple((name, type(group)) for name, group in groups.items())
    cls: Any = type(options)
    unchecked: T = _loose(cls, kinds)(**{**values, **groups})
    return unchecked


@functools.cache
def _loose(cls: type[Any], groups: tuple[tuple[str, type[Any]], ...]) -> Any:
    """A class of options that checks nothing; made once, since tyro reads the source of each new class again."""
    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__annotations__": dict(groups),
        "__post_init__": lambda self: None,
    }
    return dataclass(frozen=True, kw_only=True)(type(cls.__name__, (cls,), body))


def _checked(default: T, said: T, group: str = "") -> T:
    """The options as said, in the classes of the default, whose checks they pass."""
    kinds = _values(default)
    values = {
        name: _checked(kinds[name], value, name) if is_dataclass(kinds[name]) else value
        for name, value in _values(said).items()
    }
    try:
        return type(default)(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--{group}: {error}" if group else str(error)) from error


def _values(options: object) -> dict[str, Any]:
    assert is_dataclass(options)
    return {field.name: getattr(options, field.name) for field in fields(options) if field.init}


def _read_flags(default: T, flags: Sequence[str]) -> T:
    cls = type(default)
    about = f"{cls.__doc__ or ''}\n\n--config FILE.toml sets any option below; flags win over it."
    said: T = tyro.cli(cls, args=flags, default=default, description=about)
    return _only_said(default, said)


def _only_said(default: T, said: T) -> T:
    """Without what repeatable flags were appended to: flags win over a file, they do not add to it."""
    before, after = _values(default), _values(said)
    hints = get_type_hints(type(default), include_extras=True)
    changes: dict[str, Any] = {}
    for name, value in after.items():
        if is_dataclass(value) and not isinstance(value, type):
            changes[name] = _only_said(before[name], value)
        elif _is_repeatable(hints.get(name)) and len(value) > len(before[name]):
            changes[name] = value[len(before[name]) :]
    return replace(said, **changes)  # type: ignore[type-var]


def _is_repeatable(hint: Any) -> bool:
    return tyro.conf.UseAppendAction in getattr(hint, "__metadata__", ())


def _read_toml(default: T, path: Path) -> T:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not TOML ({error})") from error
    return _fill(default, values, f"--config {path}", "")


def _fill(default: T, values: Mapping[str, Any], where: str, prefix: str) -> T:
    known, hints = _values(default), get_type_hints(type(default))
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
            changes[name] = _fill(now, value, where, f"{prefix}{key}.")
        else:
            if isinstance(now, float) and type(value) is int:
                value = float(value)
            if isinstance(now, tuple):  # one word is a list of one
                value = (value,) if type(value) is str else value
                value = tuple(value) if type(value) is list else value
            rule = _misfit(value, now, hints[name])
            if rule:
                raise ConfigError(f"{where}: {prefix}{key} = {value!r} must be {rule}")
            changes[name] = value
    return replace(default, **changes)  # type: ignore[type-var]


def _misfit(value: Any, now: Any, hint: Any) -> str:
    """What a value should be instead; empty when it fits. ``now`` is the default, ``hint`` the annotation."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return "" if value in choices else f"one of {', '.join(choices)}"
    kinds = [type(now)] if now is not None else [k for k in get_args(hint) if k is not type(None)]
    if type(value) in kinds:
        return ""
    names = " or ".join(kind.__name__ for kind in kinds)
    return f"of type {names}" + (f", like {now!r}" if now is not None else "")


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
