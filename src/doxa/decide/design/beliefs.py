"""What is believed of θ, before an experiment or after some: draws, a density, or weighted atoms.

    w_s ∝ w_s p(y | θ_s, d)

is Bayes' rule on atoms: exact on a quadrature grid, importance sampling on draws of the prior.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributions as D

from doxa.decide.design.draws import draw, outcomes_of, unchecked
from doxa.errors import DataError, MethodError, Unavailable

Sampler = Callable[[int, torch.Generator], Tensor]


class Belief(ABC):
    """Of θ: `draw` always; `log_prob` and `atoms` where they are known."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """[n, *shape of θ]"""

    def log_prob(self, theta: Tensor) -> Tensor:
        """[...] of [..., *shape of θ]"""
        raise Unavailable(
            "the prior's density is not known: give a torch distribution, or log_prob= beside the "
            "sampler"
        )

    def atoms(self, like: Tensor, nodes: int = 200) -> Weighted:
        """θ as finitely many values with weights: all of them, or a quadrature's nodes."""
        raise Unavailable(
            "θ has no quadrature: the prior must be a list of atoms, discrete, or a distribution "
            "of one number with an inverse distribution function; estimate by draws instead"
        )


class Sampled(Belief):
    """A sampler (n, generator) -> θ [n, ...], with its log density where that is known."""

    def __init__(self, sampler: Sampler, log_prob: Callable[[Tensor], Tensor] | None) -> None:
        self.sampler, self.density = sampler, log_prob

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        theta = self.sampler(n, generator)
        if not isinstance(theta, Tensor) or not theta.ndim or len(theta) != n:
            shape = list(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
            raise DataError(f"the prior was asked for {n} draws [{n}, ...] and gave {shape}")
        return theta.to(like) if theta.is_floating_point() else theta.to(like.device)

    def log_prob(self, theta: Tensor) -> Tensor:
        return super().log_prob(theta) if self.density is None else self.density(theta)


class Distributed(Belief):
    """A torch distribution; all of its axes are those of one θ."""

    def __init__(self, distribution: D.Distribution) -> None:
        self.distribution = unchecked(distribution)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        return draw(self.distribution, (n,), generator, like).to(like)

    def log_prob(self, theta: Tensor) -> Tensor:
        value = self.distribution.log_prob(theta)
        own = len(self.distribution.batch_shape)
        return value.flatten(value.ndim - own).sum(-1) if own else value

    def atoms(self, like: Tensor, nodes: int = 200) -> Weighted:
        own = self.distribution
        table = outcomes_of(own)
        if table is not None and not own.batch_shape:
            return Weighted(table.to(like), own.log_prob(table).to(like))
        if own.batch_shape or own.event_shape:
            return super().atoms(like, nodes)
        if isinstance(own, D.Normal):  # Gauss and Hermite
            x, w = np.polynomial.hermite_e.hermegauss(nodes)
            keep = w > 1e-300
            z = torch.from_numpy(x[keep]).to(like.device)
            theta = own.loc.double() + own.scale.double() * z
            return Weighted(theta.to(like), torch.from_numpy(np.log(w[keep])).to(like))
        x, w = np.polynomial.legendre.leggauss(nodes)  # in F(θ)
        u = torch.from_numpy((x + 1) / 2).to(like)
        try:
            theta = own.icdf(u)
        except NotImplementedError:
            return super().atoms(like, nodes)
        return Weighted(theta, torch.from_numpy(np.log(w)).to(like))


class Weighted(Belief):
    """Atoms θ [S, ...] with log weights [S], which need not be normalised."""

    def __init__(self, theta: Tensor, log_weight: Tensor | None = None) -> None:
        self.theta = theta
        start = theta.new_zeros(len(theta)) if log_weight is None else log_weight
        self.log_weight = start - start.logsumexp(0)

    @property
    def weight(self) -> Tensor:
        return self.log_weight.exp()

    @property
    def effective(self) -> float:
        """1 / Σ w²: how many equal draws the atoms are worth."""
        return float(1 / self.weight.square().sum())

    @property
    def mean(self) -> Tensor:
        return torch.tensordot(self.weight, self.theta, 1)

    @property
    def std(self) -> Tensor:
        away = (self.theta - self.mean).square()
        return torch.tensordot(self.weight, away, 1).sqrt()

    def updated(self, log_likelihood: Tensor) -> Weighted:
        """After an outcome whose log likelihood is [S]."""
        new = self.log_weight + log_likelihood.to(self.log_weight)
        if not bool(torch.isfinite(new.max())):
            raise DataError("the outcome is impossible under every θ that is believed in")
        return Weighted(self.theta, new)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        index = torch.multinomial(self.weight, n, replacement=True, generator=generator)
        return self.theta[index].to(like)

    def atoms(self, like: Tensor, nodes: int = 200) -> Weighted:
        return Weighted(self.theta.to(like), self.log_weight.to(like))


def as_belief(prior: Any, log_prob: Callable[[Tensor], Tensor] | None = None) -> Belief:
    if isinstance(prior, Belief):
        return prior
    if isinstance(prior, D.Distribution):
        return Distributed(prior)
    if isinstance(prior, Tensor):  # draws of anyone's posterior
        return Weighted(prior)
    if callable(prior):
        return Sampled(prior, log_prob)
    raise MethodError(
        "prior must be a torch distribution, a function (n, generator) -> draws, a tensor of draws "
        f"or a belief, not {prior!r}"
    )
