"""The integrator: reversible, volume preserving, of second order; the mass is a change of units."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from doxa.mcmc.kernel import Point, free, leapfrog


def banana(theta: Tensor) -> tuple[Tensor, Tensor]:
    """A density with curved level sets, −½ Σ xᵢ² − 4 (x₀ − x₁²)², and its gradient by hand."""
    x, y = theta[:, 0], theta[:, 1]
    bend = x - y.square()
    value = -0.5 * theta.square().sum(1) - 4 * bend.square()
    grad = -theta.clone()
    grad[:, 0] -= 8 * bend
    grad[:, 1] += 16 * bend * y
    return value, grad


def start(chains: int = 64, size: int = 3) -> Point:
    g = torch.Generator().manual_seed(0)
    theta, momentum = torch.randn(2, chains, size, generator=g, dtype=torch.float64)
    return Point(theta, momentum, *banana(theta))


def metrics(kind: str, chains: int = 64, size: int = 3) -> Tensor:
    g = torch.Generator().manual_seed(1)
    scale = 0.5 + torch.rand(chains, size, generator=g, dtype=torch.float64)
    if kind == "diagonal":
        return scale
    return torch.diag_embed(scale) + 0.3 * torch.ones(size, size).double().tril(-1)


def column(value: float, chains: int = 64) -> Tensor:
    return torch.full((chains, 1), value, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_it_runs_backwards(kind: str) -> None:
    """Forth, momentum flipped, and as many steps again: where it began, to 1e-10."""
    there = leapfrog(banana, start(), metrics(kind), column(0.05), 40)
    assert (there.theta - start().theta).abs().max() > 0.5
    flipped = there._replace(momentum=-there.momentum)
    back = leapfrog(banana, flipped, metrics(kind), column(0.05), 40)
    assert (back.theta - start().theta).abs().max() < 1e-10
    assert (back.momentum + start().momentum).abs().max() < 1e-10
    undone = leapfrog(banana, there, metrics(kind), column(-0.05), 40)  # negative time is the same
    assert (undone.theta - start().theta).abs().max() < 1e-10
    assert (undone.momentum - start().momentum).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_the_energy_error_is_of_second_order(kind: str) -> None:
    """RMS over 64 trajectories of length 1: its slope in log ε is 2 within 0.1."""
    errors, steps = [], [64, 128, 256, 512]
    for count in steps:
        end = leapfrog(banana, start(), metrics(kind), column(1 / count), count)
        errors.append((end.energy - start().energy).square().mean().sqrt())
    x = torch.tensor(steps, dtype=torch.float64).log()
    y = -torch.stack(errors).log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert float(slope) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_it_preserves_volume(kind: str) -> None:
    """The Jacobian of five steps has determinant 1."""
    metric = metrics(kind, 1)

    def flow(z: Tensor) -> Tensor:
        theta, momentum = z[:3].unsqueeze(0), z[3:].unsqueeze(0)
        point = Point(theta, momentum, *banana(theta))
        end = leapfrog(banana, point, metric, column(0.2, 1), 5)
        return torch.cat([end.theta[0], end.momentum[0]])

    z = torch.tensor([0.3, -0.7, 1.1, 0.4, 0.9, -1.2], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(flow, z)
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1.0, abs=1e-10)
    assert (jacobian - torch.eye(6)).abs().max() > 0.1


def test_one_step_by_hand() -> None:
    """A unit Gaussian in one dimension, mass 4, from θ = 1 with the textbook's momentum p = 2:
    p ← 2 − ½·0.1·1 = 1.95;  θ ← 1 + 0.1·1.95/4 = 1.04875;  p ← 1.95 − 0.05·1.04875 = 1.8975625."""
    normal = lambda theta: (-0.5 * theta.square().sum(1), -theta)  # noqa: E731
    theta = torch.ones(1, 1, dtype=torch.float64)
    scale = torch.full((1, 1), 4**-0.5, dtype=torch.float64)
    point = Point(theta, 2 * scale, *normal(theta))
    end = leapfrog(normal, point, scale, column(0.1, 1))
    assert float(end.theta) == pytest.approx(1.04875, abs=1e-15)
    assert float(end.momentum / scale) == pytest.approx(1.8975625, abs=1e-14)
    assert float(point.energy) == pytest.approx(0.5 * 1 + 0.5 * 2**2 / 4)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_mass_is_the_textbooks(kind: str) -> None:
    """Against a naive loop with the mass matrix written out: p ∈ N(0, M), θ ← θ + εM⁻¹p."""
    metric, begin, eps = metrics(kind), start(), 0.1
    factor = torch.diag_embed(metric) if kind == "diagonal" else metric
    end = leapfrog(banana, begin, metric, column(eps), 7)
    for c in range(3):
        inverse_mass = factor[c] @ factor[c].T
        theta, p = begin.theta[c].clone(), torch.linalg.solve(factor[c].T, begin.momentum[c])
        for _ in range(7):
            p = p + 0.5 * eps * banana(theta[None])[1][0]
            theta = theta + eps * inverse_mass @ p
            p = p + 0.5 * eps * banana(theta[None])[1][0]
        assert torch.allclose(end.theta[c], theta, atol=1e-12)
        assert torch.allclose(end.momentum[c], factor[c].T @ p, atol=1e-12)
        kinetic = 0.5 * p @ inverse_mass @ p
        assert float(end.energy[c]) == pytest.approx(float(kinetic - end.log_density[c]), rel=1e-12)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_row_of_zeros_holds_a_parameter_fixed(kind: str) -> None:
    metric = metrics(kind)
    moving = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    metric = metric * (moving if kind == "diagonal" else moving[:, None])
    end = leapfrog(banana, start(), metric, column(0.1), 5)
    assert torch.equal(end.theta[:, 1], start().theta[:, 1])
    assert (end.theta[:, 0] != start().theta[:, 0]).all()
    assert torch.equal(free(metric), moving.expand(64, 3))


def test_energy_is_infinite_where_it_is_not_a_number() -> None:
    value = torch.tensor([math.nan, -math.inf, math.inf, 0.0], dtype=torch.float64)
    zero = torch.zeros(4, 1, dtype=torch.float64)
    assert Point(zero, zero, value, zero).energy.tolist() == [math.inf, math.inf, math.inf, 0.0]


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_the_points_on_the_way_are_those_of_single_steps(kind: str) -> None:
    """Half steps of the momentum are complete at every point, and the end has the same bits."""
    metric, step = metrics(kind), column(0.1)
    path: list[Point] = []
    end = leapfrog(banana, start(), metric, step, 4, path)
    point = start()
    for on_the_way in path:
        point = leapfrog(banana, point, metric, step)
        for found, expected in zip(on_the_way, point, strict=True):
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert len(path) == 4
    for found, expected in zip(end, leapfrog(banana, start(), metric, step, 4), strict=True):
        assert torch.equal(found, expected)
