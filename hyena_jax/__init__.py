"""Sub-quadratic sequence models in JAX."""
