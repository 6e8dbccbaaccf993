"""What README.md says of errors, the code says too."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def messages() -> str:
    """The source with its literals joined, as they are when they are shown."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "ray_ckpt").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_each_error_of_the_table_is_one_that_the_code_raises():
    text = (ROOT / "README.md").read_text()
    table = text.partition("### When something is wrong")[2].partition("###")[0]
    rows = re.findall(r"^\| (`.*?`) \| ", table, re.MULTILINE)
    assert len(rows) >= 10
    said = messages()
    for row in rows:
        for phrase in re.findall(r"`(.*?)`", row):
            # Numbers and ranks are filled in; what is left between them is in the source.
            for part in re.split(r"\d+(?:\.\d+)?|[:;]", phrase):
                assert part.strip() in said, f"{phrase!r}: {part!r} is in no message"


def test_what_it_points_to_in_the_repository_is_there():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?://|#)([^)]+)\)", text)
    paths = re.findall(r"`((?:jobs|cluster|ray_ckpt|tests)/[\w/.]+\.(?:py|yaml|json))`", text)
    assert len(links) >= 6
    assert len(paths) >= 15
    assert [path for path in (*links, *paths) if not (ROOT / path).exists()] == []


def test_each_source_of_the_comparison_is_named_and_used():
    text = (ROOT / "README.md").read_text()
    part = text.partition("## Beside others")[2].partition("\n## ")[0]
    table = [line for line in part.splitlines() if line.startswith("|")]
    used = {int(number) for line in table for number in re.findall(r"\[(\d+)\]", line)}
    named = [int(number) for number in re.findall(r"^\[(\d+)\] ", part, re.MULTILINE)]
    assert named == list(range(1, len(named) + 1))
    assert used == {*named}
    assert len({line.count("|") for line in table}) == 1
