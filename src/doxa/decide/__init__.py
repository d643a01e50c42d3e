"""Decisions: what to label next (active learning), and what to measure next (design)."""

from doxa.decide import active, design
from doxa.decide.acquisition import (
    bald,
    epig,
    margin,
    max_entropy,
    mean_std,
    predictive_variance,
    random,
    variation_ratio,
)
from doxa.decide.batch import Batch, batch_bald
from doxa.decide.design import eig
from doxa.decide.select import TopRows, joint, score, select, top_rows

__all__ = [
    "Batch", "TopRows", "active", "bald", "batch_bald", "design", "eig", "epig", "joint", "margin",
    "max_entropy", "mean_std", "predictive_variance", "random", "score", "select",
    "top_rows", "variation_ratio",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
