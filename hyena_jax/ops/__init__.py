"""Pure functions on arrays: no Flax, no config, no global state."""
