"""Sweeps over settings: many runs of one config, planned, trained, continued and compared."""
