"""Markov chain Monte Carlo: methods that draw from the posterior with Markov chains."""
