"""A Ray of one's own to put things into: the installed one, by links, but for the folder of the dashboard's modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ray_ckpt.ray_dashboard import SHIM_FOLDER

_OWN = ("ray", "dashboard", "modules")


def copy_ray(site: Path) -> Path:
    """Makes ``site/ray``; with ``site`` first in ``PYTHONPATH`` a process has it for its Ray.

    Returns:
        The folder of its dashboard's modules, which nobody else has.
    """
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    source, target = Path(spec.origin).parent.parent, site
    for name in _OWN:
        source, target = source / name, target / name
        target.mkdir(parents=True)
        for item in source.iterdir():
            if item.name == SHIM_FOLDER:
                continue  # whoever ran a job here has the page in the installed one
            if item.name not in (*_OWN[1:], "__pycache__") or item.is_file():
                (target / item.name).symlink_to(item)
    return target
