"""What all commands print in the same way."""

from __future__ import annotations

import json
import sys

from ray_ckpt.view.tables import printable

EXIT_FAULT = 1
"""Exit code of a command that found something wrong."""


def print_json(value: object) -> None:
    """Prints a document for scripts."""
    print(json.dumps(value, indent=2))


def note(text: str) -> None:
    """Says something beside the output, on stderr."""
    print(printable(text), file=sys.stderr)
