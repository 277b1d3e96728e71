"""Training: state, optimizer, step, loop, parallelism, checkpoints, metrics."""
