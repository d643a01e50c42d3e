"""Experiments of the literature, ready to run."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Independent, Normal

from doxa import checks
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.space import Choices, Reals
from doxa.errors import MethodError


def working_memory(
    mean: float = 7.0, std: float = 2.0, longest: int = 15, dtype: torch.dtype = torch.float64
) -> Experiment:
    """How many digits can a person repeat? θ ~ N(mean, std²), and a list of l digits is repeated
    without a mistake with probability sigmoid(θ − l)."""
    checks.positive("std", std)
    if not math.isfinite(mean):
        raise MethodError(f"mean must be a finite number, not {mean!r}")
    prior = Normal(torch.tensor(mean, dtype=dtype), torch.tensor(std, dtype=dtype))

    def likelihood(theta: Tensor, length: Tensor) -> Bernoulli:
        return Bernoulli(logits=theta - length, validate_args=False)

    return Experiment(prior, likelihood, space=Choices(torch.arange(1, longest + 1, dtype=dtype)))


def location_finding(
    sources: int = 2,
    dimensions: int = 2,
    noise: float = 0.5,
    background: float = 0.1,
    closest: float = 1e-4,
    device: torch.device | str = "cpu",
) -> Experiment:
    """Where are K hidden sources? θ_k ~ N(0, I), and at d one measures

        y ~ N(log(b + Σ_k 1/(m + ‖θ_k − d‖²)), σ²)

    Sheng & Hu (2005), as in Foster et al. (2021): K = 2 sources in the plane, σ = 0.5, b = 0.1,
    m = 1e-4."""
    zeros = torch.zeros(sources, dimensions, device=device)
    spread = torch.tensor(noise, device=device)  # made once: a captured step sends nothing to a GPU
    prior = Independent(Normal(zeros, torch.ones_like(zeros), validate_args=False), 2)

    def likelihood(theta: Tensor, design: Tensor) -> Normal:
        squared = (theta - design.unsqueeze(-2)).square().sum(-1)  # [..., K]
        strength = background + (closest + squared).reciprocal().sum(-1)
        return Normal(strength.log(), spread.to(strength), validate_args=False)

    return Experiment(prior, likelihood, space=Reals(dimensions))
