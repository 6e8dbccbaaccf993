"""Shared by all tests.

Properties are tried with few examples by default, so that the tests are quick; ``HYPOTHESIS_PROFILE=thorough`` (or
``--hypothesis-profile=thorough``) tries as many as each of them asks for, as the tests before a change lands do.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "jobs", ROOT / "tests", ROOT / "tests" / "dist"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

QUICK, THOROUGH = 12, 100  # examples; in a quick run also of a property that asks for more
settings.register_profile("quick", max_examples=QUICK, deadline=None)
settings.register_profile("thorough", max_examples=THOROUGH, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

gc.disable()  # until all is imported: the collector finds nothing in modules, and looks again and again


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spreads a run of all of ``tests/unit`` over the cores, where pytest-xdist is installed; ``-n 0`` does not.

    All other runs stay in one process: the tests that start processes of their own use the cores themselves.
    """
    option = config.option
    if getattr(option, "numprocesses", 0) is not None or hasattr(config, "workerinput"):
        return  # no xdist, or somebody said how many, or this is one of them
    if option.usepdb or option.collectonly or option.capture == "no" or option.keyword:
        return
    paths = {(config.invocation_params.dir / argument).resolve() for argument in config.args}
    if paths == {ROOT / "tests" / "unit"}:
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
