"""When to save: pure arithmetic, no Ray, no torch, no clock. Times in seconds.

Usable alone, from numbers that you measured yourself::

    from ray_ckpt.policy import efficiency, exact

    interval = exact(stall=5.0, mtbf=6 * 3600.0)                       # 461 s between saves
    goodput = efficiency(interval, stall=5.0, mtbf=6 * 3600.0, restart=120.0, upload=60.0)

Whole decisions, with several tiers and their reasons in words, are in :mod:`ray_ckpt.policy.decision`; beliefs about
failures that are learnt on the way in :mod:`ray_ckpt.policy.belief`.
"""

from ray_ckpt.policy.interval import daly, efficiency, exact, overhead, waste, young

__all__ = ["daly", "efficiency", "exact", "overhead", "waste", "young"]
