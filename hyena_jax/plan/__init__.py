"""Training steps compiled ahead of time for accelerators that need not be there, and what that shows."""
