"""Samplers as tables (NumPy), noise from seeds, guidance, and the loop over a table (keras.ops)."""
