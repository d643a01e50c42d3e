"""The spectral Stein estimate of a score against scores in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.function.functional_vi import stein_score


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_gaussians_score_in_two_dimensions() -> None:
    """−Σ⁻¹(f − m), relative error over 10 × 400 draws below 0.3 (Shi, Sun & Zhu have about 0.1 at
    the bulk of a one-dimensional Gaussian); the slope on the true score within 10 %."""
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]]).double()
    away = normal(10, 400, 2)
    wanted = -away @ torch.linalg.inv(root)
    found = stein_score(away @ root.mT + 3.0)
    assert (found - wanted).norm() / wanted.norm() < 0.3
    assert abs(float((found * wanted).sum() / wanted.square().sum()) - 1) < 0.1


def test_a_mixtures_score_at_other_points() -> None:
    """½N(−2, 1) + ½N(2, 1) has the score −f + 2 tanh(2f), which pulls to the nearer mode. From
    1,000 draws, at points that are none, within 0.35; its Gaussian's score would be 0.7 off."""
    sign = torch.where(normal(1, 1000, 1) > 0, 2.0, -2.0)
    draws = sign + normal(2, 1000, 1)[1:]
    at = torch.linspace(-3.5, 3.5, 29).double().reshape(1, -1, 1)
    wanted = -at + 2 * (2 * at).tanh()
    assert (stein_score(draws, at) - wanted).square().mean().sqrt() < 0.35
    assert (wanted + at / draws.var(1, keepdim=True)).square().mean().sqrt() > 0.7


def test_other_points_that_are_the_draws_give_the_same() -> None:
    draws = normal(2, 30, 3)
    assert torch.allclose(stein_score(draws), stein_score(draws, draws), atol=1e-8)


def test_the_estimate_scales_with_the_draws() -> None:
    """The score of a·f + b is that of f over a: the kernel's width is the draws' own."""
    draws = normal(1, 40, 3)
    assert torch.allclose(stein_score(2.5 * draws + 1.0), stein_score(draws) / 2.5, atol=1e-8)
