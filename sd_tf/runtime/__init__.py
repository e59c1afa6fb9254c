"""Run an export: manifest, call, chain of models, pictures. No model code is imported."""
