"""A parser of a command line that says what may have been meant."""

from __future__ import annotations

import argparse
import difflib
from typing import Any


class Parser(argparse.ArgumentParser):
    """As its base, but what it does not know is an error of the command at hand, with the nearest option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return found, unknown

    def _hint(self, unknown: list[str]) -> str:
        word = unknown[0].partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(word, options, n=1) if word.startswith("-") else []
        return f" (did you mean {near[0]}?)" if near else ""
