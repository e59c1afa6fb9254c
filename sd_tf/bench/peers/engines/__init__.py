"""A module for each engine; its `load(job)` returns the engine's stages, ready to be called."""

import os

# OpenVINO's converter reports its use, from processes that outlive a worker; in CI it does not.
os.environ["CI"] = "true"
