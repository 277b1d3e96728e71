"""The same values as in `ops`, faster: a reader may skip it."""
