"""The scale of a Gaussian prior at the maximum of the ELBO (empirical Bayes).

    −KL(q ‖ p_τ) is largest, over precisions τ/s² of n weights, at   τ = n / Σ (σ² + (μ − m)²)/s²

in closed form, so that nothing is trained: every step takes the gradient at the best τ for the q it
is at, which is the gradient of max_τ ELBO. "shared": one τ for all uncertain weights; "layer": one
for each tensor. Weights that are points are under the prior as given. MacKay (1992) has the same
of a Laplace approximation; Blundell et al. (2015), section 3.3, warn of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.method import Run
from doxa.method.scaled_priors import scaled_priors
from doxa.priors import Prior


def check_gaussian(run: Run) -> None:
    if not run.subset_prior.is_gaussian:
        raise MethodError(
            "prior_scale learns the scale of a Gaussian prior: use doxa.Normal or FanInNormal, or "
            "prior_scale='given'"
        )


class Scaled:
    """A Gaussian prior at its best scale for one q: μ [M, subset] and σ, without gradients."""

    def __init__(self, run: Run, kind: str, mean: Tensor, std: Tensor) -> None:
        prior = run.subset_prior
        assert prior.precision is not None
        self.width = prior.precision * std
        self.pull = prior.precision * (mean - prior.mean)  # minus the score
        squares = self.pull * (mean - prior.mean) + self.width * std  # [M, subset]
        if kind == "shared":
            self.each = squares.mean(1, keepdim=True).reciprocal()  # τ, [M, 1]
            self.tau = self.each
        else:
            sizes = run.layout.select(run.net.subset_names).sizes
            parts = squares.split(sizes, 1)
            means = [part.mean(1, keepdim=True).reciprocal() for part in parts]
            self.each = torch.cat(means, 1)  # [M, tensors]
            wide = [one.expand(-1, size) for one, size in zip(means, sizes, strict=True)]
            self.tau = torch.cat(wide, 1)  # [M, subset]
        self.gain = 0.5 * (self.tau.log() - (self.tau - 1) * squares).sum(1)  # over τ = 1, [M]

    def more(self) -> tuple[Tensor, Tensor]:
        """What the gradients by μ and σ have besides those under the given prior, [M, subset]."""
        return (1 - self.tau) * self.pull, (1 - self.tau) * self.width


def best_priors(run: Run, kind: str, mean: Tensor, std: Tensor) -> list[Prior | dict[str, Prior]]:
    """Each member's prior at its best scale."""
    names = [name for name in run.layout.names if name in set(run.net.subset_names)]
    each = Scaled(run, kind, mean, std).each.expand(-1, len(names)).rsqrt()
    return scaled_priors(run, {name: each[:, i] for i, name in enumerate(names)})
