"""Shared by all tests.

Properties are tried with few examples by default, so that the tests are quick; ``HYPOTHESIS_PROFILE=thorough`` (or
``--hypothesis-profile=thorough``) tries as many as each of them asks for, as the tests before a change lands do.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
UNIT = ROOT / "tests" / "unit"
for folder in (ROOT, ROOT / "jobs", ROOT / "tests", ROOT / "tests" / "dist"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

QUICK, THOROUGH = 8, 100  # examples; in a quick run also of a property that asks for more
settings.register_profile("quick", max_examples=QUICK, deadline=None)
settings.register_profile("thorough", max_examples=THOROUGH, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

gc.disable()  # until all is imported: the collector finds nothing in modules, and looks again and again


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Makes a run of tests of ``tests/unit`` alone quick.

    Their files are made in memory, unless TMPDIR says where: they are thousands of a few bytes, and a disk takes longer
    for one than its test does. A run of all of them is spread over the cores where pytest-xdist is installed, unless
    ``-n`` says how. All other runs stay as they are: those tests use disk and cores themselves.
    """
    if hasattr(config, "workerinput"):
        return  # one of the processes of xdist
    names = (argument.partition("::")[0] for argument in config.args)
    paths = {(config.invocation_params.dir / name).resolve() for name in names}
    if not all(path.is_relative_to(UNIT) for path in paths):
        return
    if "TMPDIR" not in os.environ and os.access("/dev/shm", os.W_OK):
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
    option = config.option
    shows = option.usepdb or option.collectonly or option.capture == "no"
    if (
        paths == {UNIT}
        and not (shows or option.keyword)
        and getattr(option, "numprocesses", 0) is None
    ):
        option.numprocesses, option.dist = min(4, os.cpu_count() or 1), "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits the examples of a quick run; without this name inside Hypothesis all would be as in a thorough one."""
    if settings.default.max_examples >= THOROUGH:
        return
    for item in items:
        test = getattr(item, "obj", None)
        asked = getattr(test, "_hypothesis_internal_use_settings", None)
        if asked is not None and asked.max_examples > QUICK:
            test._hypothesis_internal_use_settings = settings(asked, max_examples=QUICK)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()
