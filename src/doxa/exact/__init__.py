"""Conjugate models, where Bayes needs no approximation."""
