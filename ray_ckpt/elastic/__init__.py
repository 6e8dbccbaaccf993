"""Interruptions, resizes, and sums that fit any number of workers."""
