"""Training: loss, optimizer, schedules, step, loop, run folder, checkpoints, metrics."""
