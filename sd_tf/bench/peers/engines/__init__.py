"""One module for each engine: `load(job)` gives its stages, ready to be called."""
