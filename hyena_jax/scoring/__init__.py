"""Log-likelihoods of texts under a language model."""
