"""Training of checkpoints: Keras 3, compiled by XLA, on TensorFlow or JAX, one host or several."""
