"""What an exact resume restores."""
