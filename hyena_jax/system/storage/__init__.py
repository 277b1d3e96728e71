"""Buckets of Google Cloud Storage: names in them, and their objects."""
