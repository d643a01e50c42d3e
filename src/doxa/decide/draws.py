"""The draws of a predictive, row by row: what joint quantities of several rows are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.errors import ShapeError, Unavailable
from doxa.likelihoods import Bernoulli
from doxa.predictive import Predictive


def class_probs(p: Predictive) -> tuple[Tensor, Tensor]:
    """(weights [S], probabilities [S, N, C]) in float64; for Bernoulli C = 2, no and yes."""
    logits = p.samples.double()
    if isinstance(p.likelihood, Bernoulli):
        yes = _one_label(logits.sigmoid(), 2)
        return p.weights.double(), torch.stack([1.0 - yes, yes], 2)
    return p.weights.double(), _one_label(logits.softmax(2), 3)


def _one_label(probs: Tensor, axes: int) -> Tensor:
    """Without the axes of length one that follow; a row with several labels is refused."""
    if probs.shape[axes:].numel() != 1:
        raise ShapeError(
            f"rows have {probs.shape[axes:].numel()} labels each: what several rows teach together "
            "is counted for one label a row"
        )
    return probs.reshape(probs.shape[:axes])


def scaled_functions(p: Predictive) -> tuple[Tensor, Tensor]:
    """(z, noise) in float64 of numbers with Gaussian noise: z [S, N, D] are the functions about
    their mean, times √weight, so that zᵀz is their covariance; noise [N, D] the variance of y
    given f, averaged."""
    if not p.likelihood.is_normal:
        raise Unavailable(
            f"what several rows teach together is known of classes and of numbers with Gaussian "
            f"noise, not of a {p.likelihood.name} predictive"
        )
    means, weights = p.samples.double(), p.weights.double()
    means = means.reshape(*means.shape[:2], -1)
    centre = torch.einsum("s,snd->nd", weights, means)
    z = (means - centre) * weights.sqrt()[:, None, None]
    return z, p.aleatoric.double().reshape(centre.shape)
