"""Variational inference: the methods, one a file, and its tools: divergences and gradients."""

from doxa.vi import kl

__all__ = ["gradients", "kl"]
