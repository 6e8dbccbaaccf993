"""The one global order of samples."""

from ray_ckpt.data.sampler import GlobalOrderSampler, sample_offset

__all__ = ["GlobalOrderSampler", "sample_offset"]
