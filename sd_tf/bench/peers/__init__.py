"""Compare our SavedModels with other engines on the same weights, inputs and machine.

Every engine runs in a process of its own (`worker`), driven by lines of JSON (`process`). Ours
stays loaded for all peers of a size. Each peer takes turns with it, stage by stage, and ends before
the next one starts, so that other load on the machine affects both alike. This process imports
neither TensorFlow nor PyTorch: unmeasured work that needs them runs in its own process (`apart`).
"""

from sd_tf.bench.peers.own_process import apart

__all__ = ["apart"]
