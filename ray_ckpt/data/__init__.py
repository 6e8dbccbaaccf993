"""The one global order of samples.

Usable alone, over any map-style dataset, with torchdata's ``StatefulDataLoader`` or torch's ``DataLoader``; see
:mod:`ray_ckpt.data.sampler`.
"""

from ray_ckpt.data.own import dataset_order
from ray_ckpt.data.plan import BatchPlan
from ray_ckpt.data.sampler import GlobalOrderSampler, sample_offset

__all__ = ["BatchPlan", "GlobalOrderSampler", "dataset_order", "sample_offset"]
