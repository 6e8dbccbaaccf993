"""The commands of README.md, one by one, as somebody would give them to a shell."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks() -> list[list[str]]:
    """The commands of each block, without their comments; one that goes on over lines is one."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
        plain = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in lines)
        found.append([line for line in plain if line])
    return found


def commands() -> list[str]:
    """All of them, each once, in their order."""
    return list(dict.fromkeys(line for block in blocks() for line in block))


def block_of(first: str) -> list[str]:
    """The commands of the block that begins with one."""
    return next(block for block in blocks() if block[0] == first)
