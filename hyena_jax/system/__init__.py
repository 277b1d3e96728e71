"""What is below the models: errors, files, buckets, signals, the start of JAX, chips, and output."""
