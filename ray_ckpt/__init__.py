"""Fault-tolerant, elastic PyTorch training on Ray."""

__version__ = "0.1.0"
