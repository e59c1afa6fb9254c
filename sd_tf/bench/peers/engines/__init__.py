"""A module for each engine; its `load(job)` returns the engine's stages, ready to be called."""
