"""What makes every test here quick."""

from __future__ import annotations

import os
import sys

import pytest

from ray_ckpt.checkpoint import storing


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk keeps its promise or not, which no test can see; those of what is synced have an fsync of their own.

    Nor is there anything to wait for between the tries of a read.
    """
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(storing, "_READ_PAUSES_S", (0.0, 0.0))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tensors here are small: more threads only wait for each other, all the more on a machine that is busy."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
