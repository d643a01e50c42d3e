"""Models whose posterior is exact: linear in their features, and averages of models."""

from doxa.exact.models import model_average, posterior_over_models

__all__ = ["model_average", "posterior_over_models"]
