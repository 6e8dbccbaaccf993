"""The commands of ``ray-ckpt``, a module for each or for a few that belong together; ``ray_ckpt.cli`` is the door."""
