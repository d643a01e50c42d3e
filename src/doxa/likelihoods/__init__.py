"""Likelihoods p(y | f) of targets y given network outputs f, by name or as objects."""

from __future__ import annotations

from doxa.likelihoods.base import Likelihood, Theta
from doxa.likelihoods.classes import Bernoulli, Categorical
from doxa.likelihoods.compose import Affine, Heads, NoiseScale, ScaledNoise
from doxa.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian, StudentT
from doxa.likelihoods.laplace_noise import LaplaceNoise
from doxa.likelihoods.negative_binomial import Counts, NegativeBinomial
from doxa.likelihoods.poisson import Poisson
from doxa.likelihoods.table import LIKELIHOODS, Inferred, assumed, infer, likelihood

__all__ = [
    "LIKELIHOODS",
    "Affine",
    "Bernoulli",
    "Categorical",
    "Counts",
    "Gaussian",
    "Heads",
    "HeteroscedasticGaussian",
    "Inferred",
    "LaplaceNoise",
    "Likelihood",
    "NegativeBinomial",
    "NoiseScale",
    "Poisson",
    "ScaledNoise",
    "StudentT",
    "Theta",
    "assumed",
    "infer",
    "likelihood",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
