"""Text as tokens, tokens as batches: NumPy out, no JAX and no models."""
