"""The one global order of samples."""
