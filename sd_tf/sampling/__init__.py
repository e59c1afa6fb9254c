"""Noise schedules and samplers as tables (NumPy); noise, guidance and the loop (keras.ops)."""
