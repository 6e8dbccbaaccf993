"""Makes the `cluster` folder of this repository importable: it is not part of the installed package."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# The Ray that is installed here is not changed by tests; those of the page bring a Ray of their own.
os.environ.setdefault("RAY_CKPT_DASHBOARD", "0")
