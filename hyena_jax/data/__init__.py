"""Text and images as batches: NumPy out, no JAX and no models."""
