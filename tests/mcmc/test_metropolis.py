"""Random-walk Metropolis: moments, the acceptance it is tuned to, and the proposal it learns."""

from __future__ import annotations

import math

import pytest
import torch
from bare_density import gaussian, sample
from torch import Tensor

import doxa
from doxa.errors import MethodError


def starts(chains: int, size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(chains, size, generator=torch.Generator().manual_seed(2)).double()


def correlated(size: int) -> Tensor:
    root = torch.eye(size, dtype=torch.float64) + 0.7 * torch.ones(size, size).double().tril(-1)
    return root @ root.T


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_moments_of_a_gaussian(temperature: float) -> None:
    """80 chains from everywhere: 6 moments within 4.5 standard errors, from the chains' own means;
    a temperature multiplies the covariance."""
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    method = doxa.Metropolis(draws=600, burn_in=400, temperature=temperature)
    draws = sample(gaussian(correlated(3), mean), starts(80, 3), method).draws
    variance = temperature * correlated(3).diagonal()
    for values, want in ((draws, mean), ((draws - mean).square(), variance)):
        means = values.mean(1)
        error = means.std(0) / math.sqrt(80)
        assert ((means.mean(0) - want).abs() < 4.5 * error).all()
        assert (error < 0.1 * variance.max()).all()


@pytest.mark.parametrize(("size", "target"), [(1, 0.44), (6, 0.234)])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_acceptance_is_tuned_whatever_the_units(size: int, target: float, scale: float) -> None:
    density = gaussian(scale**2 * correlated(size))
    chains = sample(density, starts(30, size, scale), doxa.Metropolis(draws=150, burn_in=500))
    assert float(chains.told["accept"].mean()) == pytest.approx(target, abs=0.07)


def test_the_proposal_has_the_shape_of_the_target() -> None:
    """F Fᵀ of each chain, averaged over 30: correlations within 0.1."""
    chains = sample(gaussian(correlated(3)), starts(30, 3), doxa.Metropolis(draws=1, burn_in=1000))
    metric = chains.state["metric"]
    mean = (metric @ metric.mT).mean(0)
    assert torch.allclose(_correlation(mean), _correlation(correlated(3)), atol=0.1)


def _correlation(covariance: Tensor) -> Tensor:
    scale = covariance.diagonal().rsqrt()
    return scale[:, None] * covariance * scale


def test_the_proposal_does_not_change_while_draws_are_kept() -> None:
    chains = sample(gaussian(correlated(2)), starts(3, 2), doxa.Metropolis(draws=20, burn_in=60))
    assert (chains.told["step_size"] == chains.told["step_size"][:, :1]).all()


def test_settings_are_checked() -> None:
    for bad in ({"draws": 0}, {"scale": 0.0}, {"covariance": "round"}, {"temperature": -1.0}):
        with pytest.raises(MethodError):
            doxa.Metropolis(**bad)
