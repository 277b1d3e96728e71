"""The operators in plain NumPy float64 loops, written to be read beside the papers: oracle and text."""
