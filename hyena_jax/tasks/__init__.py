"""Synthetic tasks: how a row is drawn, what chance scores, and the published settings; NumPy alone."""
