"""Where copies of checkpoints live, and how long."""
