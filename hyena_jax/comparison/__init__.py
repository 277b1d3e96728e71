"""Runs compared: their curves in one figure, and what they reached in one table."""
