"""Training, for models small and large: Keras 3, compiled by XLA, on TensorFlow or JAX alike."""
