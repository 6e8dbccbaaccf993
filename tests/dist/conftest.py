"""Some tests here start no processes and are only slow; what makes those of tests/unit quick is for them too."""

from __future__ import annotations

import os

import pytest

from ray_ckpt.checkpoint import storing


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks keep their promises, and between the tries of a read there is nothing to wait for."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(storing, "_READ_PAUSES_S", (0.0, 0.0))
