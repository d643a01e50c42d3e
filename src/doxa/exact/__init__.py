"""Exact posteriors of models that are linear in their features, and averages over models."""

from doxa.exact.models import model_average, posterior_over_models

__all__ = ["model_average", "posterior_over_models"]
