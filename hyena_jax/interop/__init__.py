"""Weights of other projects: read into run folders, and written for `transformers`."""
