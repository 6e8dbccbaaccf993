"""Shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "jobs", ROOT / "tests", ROOT / "tests" / "dist"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
