"""What makes every test here quick."""

from __future__ import annotations

import os

import pytest

from ray_ckpt.checkpoint import storing


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk keeps its promise or not, which no test can see; those of what is synced have an fsync of their own.

    Nor is there anything to wait for between the tries of a read.
    """
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(storing, "_READ_PAUSES_S", (0.0, 0.0))
