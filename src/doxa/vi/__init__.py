"""Variational inference: one file per method, and shared tools for divergences and gradients."""

from doxa.vi import kl

__all__ = ["gradients", "kl"]
