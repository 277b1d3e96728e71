"""Long filters as small recurrences (Massaroli et al. 2023, arXiv 2310.18780), and what is lost."""
