"""Replaces long filters by small recurrences, and measures the error.

Massaroli et al. 2023, arXiv 2310.18780.
"""
