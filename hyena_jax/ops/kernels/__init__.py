"""Pallas kernels, and `check`, which compares each on the device with a plain form of `ops`."""
