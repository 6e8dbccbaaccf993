"""Where a drill gets the model from: a *job*, a function that gives a run's options and its training function.

``FILE.py``, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``; the function is called ``job`` when nothing else is said::

    def job(run_dir: Path, arguments: Sequence[str]) -> tuple[Config, Callable[[Config], None]]: ...
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray_ckpt.config import Config
from ray_ckpt.errors import ConfigError

DEFAULT = "jobs/drill.py"

Job = Callable[[Path, Sequence[str]], tuple[Config, Callable[[Any], Any]]]


def load_job(text: str) -> Job:
    """The function that a person named.

    Raises:
        ConfigError: it is not there.
    """
    place, _, name = text.partition(":")
    if not place:
        raise ConfigError(
            f"--job {text!r}: write FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION of your training code"
        )
    try:
        module = _from_file(place) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"--job {text}: {place} cannot be imported ({error})") from error
    found = getattr(module, name or "job", None)
    if not callable(found):
        raise ConfigError(
            f"--job {text}: {place} has no function {name or 'job'}(run_dir, arguments) that gives the options of the "
            "run and its training function"
        )
    job: Job = found
    return job


def _from_file(place: str) -> Any:
    path = _find(place)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a program
    spec = importlib.util.spec_from_file_location(f"ray_ckpt_job_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _find(place: str) -> Path:
    """A file as it is given; that of the main job also beside the package, wherever one stands."""
    beside = Path(__file__).resolve().parents[2] / place
    for path in (Path(place).expanduser().absolute(), *([beside] if place == DEFAULT else [])):
        if path.is_file():
            return path
    raise ConfigError(
        f"--job {place}: there is no such file. A drill runs your training function: name the file that has it, with "
        "a function job(run_dir, arguments)"
    )
