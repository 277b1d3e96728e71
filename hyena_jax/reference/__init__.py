"""The operators as plain NumPy float64 loops: oracles for the tests, to be read next to the papers."""
