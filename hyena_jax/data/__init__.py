"""Text, images and tasks as batches: NumPy out, no JAX and no models."""
