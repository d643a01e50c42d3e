"""A Gaussian posterior whose mini-batch chains have moments that can be computed exactly.

The model is a location with known noise, y_i ~ N(θ, diag σ²), prior N(0, I): the potential is
quadratic with precision A = n/σ² + 1, and the error of a mini-batch's gradient,

    ξ = (n/B) Σ_batch (y_i − ȳ)/σ²,

does not depend on θ. A linear recursion driven by ξ and Gaussian noise has first and second moments
that follow from matrices alone (`predicted`), whatever the schedule of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import doxa

Z = 4.5  # |z| above this comes by chance 7 times in a million


class Location(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.loc.expand(x.shape[0], -1)


@dataclass(frozen=True)
class Target:
    y: Tensor  # [n, D]
    noise: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.y)

    @property
    def precision(self) -> Any:
        return np.diag([self.n / s**2 + 1.0 for s in self.noise])

    @property
    def mean(self) -> Any:
        return (self.y.numpy() / np.square(self.noise)).sum(0) / np.diag(self.precision)

    def gradient_noise(self, batch: int, independent: bool = False) -> Any:
        """Cov[ξ]: sampling with replacement, or within an epoch without."""
        scores = self.y.numpy() / np.square(self.noise)
        spread = np.atleast_2d(np.cov(scores.T, bias=True)) * self.n**2 / batch
        return spread if independent else spread * (self.n - batch) / (self.n - 1)

    def fit(self, method: Any, copies: int = 1, **options: Any) -> Any:
        """Copies of all outputs side by side are chains of their own where batches are full:
        nothing but their own noise moves them."""
        model = doxa.Model(
            Location(copies * len(self.noise)), doxa.Gaussian(list(self.noise) * copies)
        )
        data = torch.zeros(self.n, 1, dtype=torch.float64), self.y.repeat(1, copies)
        return doxa.fit(model, data, method, init="given", engine="stack:eager", **options)


def target(n: int = 64, noise: tuple[float, ...] = (0.5, 0.7, 1.0), seed: int = 3) -> Target:
    """Correlated outputs, so that the gradients' noise has another shape than the precision."""
    rng = np.random.default_rng(seed)
    size = len(noise)
    mixing = np.eye(size) + 0.6 * np.eye(size, k=1)
    y = 0.4 + rng.normal(size=(n, size)) @ mixing * np.array(noise)
    return Target(torch.from_numpy(y), noise)


def predicted(
    goal: Target, stages: list[Any], kept: list[list[int]], *, batch: int, friction: float = 1.0,
    temperature: Any = 1.0, independent: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """E[θ − μ] and E[(θ − μ)(θ − μ)ᵀ], averaged over the kept steps.

    stages: the step sizes of each stage; kept: which of its steps (counted from 1) are kept;
    temperature: one for all stages, or one each. friction 1 is Langevin dynamics.
    """
    size, epoch = len(goal.noise), goal.n // batch
    eye, zero = np.eye(size), np.zeros((size, size))
    spread = goal.gradient_noise(batch, independent)
    heats = temperature if isinstance(temperature, list) else [temperature] * len(stages)
    mean = np.concatenate([-goal.mean, np.zeros(2 * size)])  # of (θ − μ, v, Σ ξ of the epoch)
    second = np.outer(mean, mean)
    firsts, seconds = [], []
    for etas, keeps, heat in zip(stages, kept, heats, strict=True):
        for t, eta in enumerate(etas):
            j = t % epoch
            if j == 0:  # every stage, and every epoch, shuffles anew
                mean[2 * size :] = 0
                second[2 * size :] = second[:, 2 * size :] = 0
            back = 0.0 if independent or epoch == 1 else 1.0 / (epoch - j)
            fresh = 1.0
            if not independent and epoch > 1:
                fresh = 1.0 - j / ((epoch - 1) * (epoch - j))
            noise = spread * fresh if epoch > 1 else zero
            velocity = np.hstack([-eta * goal.precision, (1 - friction) * eye, -eta * back * eye])
            step = np.vstack(
                [np.hstack([eye, zero, zero]) + velocity, velocity,
                 np.hstack([zero, zero, (1 - back) * eye])]
            )  # fmt: skip
            push = np.vstack([eta * eye, eta * eye, eye])
            hot = np.vstack([eye, eye, zero])
            mean = step @ mean
            second = step @ second @ step.T + push @ noise @ push.T
            second += 2 * friction * eta * heat * hot @ hot.T
            if t + 1 in keeps:
                firsts.append(mean[:size].copy())
                seconds.append(second[:size, :size].copy())
    return np.mean(firsts, 0), np.mean(seconds, 0)


def measured(posterior: Any, goal: Target) -> tuple[Any, Any, Any, Any]:
    """The same from the chains, with standard errors from their being independent."""
    draws = posterior.samples.unflatten(2, (-1, len(goal.noise)))  # [M, T, copies, D]
    away = draws.transpose(1, 2).flatten(0, 1).numpy() - goal.mean  # [chains, T, D]
    first = away.mean(1)
    second = np.einsum("mti,mtj->mij", away, away) / away.shape[1]
    root = np.sqrt(len(away))
    return first.mean(0), first.std(0) / root, second.mean(0), second.std(0) / root


def assert_moments(posterior: Any, goal: Target, want: tuple[Any, Any], power: float) -> None:
    """Means and second moments within Z standard errors, which are below `power` of the
    variances: a smaller difference than that cannot be told."""
    mean, mean_error, second, error = measured(posterior, goal)
    assert (np.abs(mean - want[0]) < Z * mean_error).all()
    assert (np.abs(second - want[1]) < Z * error).all()
    assert (np.diag(error) < power * np.diag(want[1])).all()
