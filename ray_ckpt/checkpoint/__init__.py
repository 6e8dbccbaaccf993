"""How one checkpoint is made, proved and read back."""
