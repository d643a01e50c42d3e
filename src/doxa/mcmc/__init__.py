"""Markov chains that have the posterior as their stationary distribution."""
