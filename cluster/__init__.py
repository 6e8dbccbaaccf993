"""Where a run lives: clusters on one machine, on Kubernetes, or made by Ray's cluster launcher."""
