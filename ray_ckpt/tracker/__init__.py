"""The actor that remembers a run and decides for it."""
