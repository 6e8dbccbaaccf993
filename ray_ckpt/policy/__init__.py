"""When to save: pure arithmetic, no Ray, no torch, no clock."""
