"""Variational inference: the methods, one a file, and its tools: divergences and gradients."""

from doxa.vi import gradients, kl

__all__ = ["gradients", "kl"]
