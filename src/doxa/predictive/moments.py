"""Moments of a predictive from draws that come in chunks, so that no draw is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError
from doxa.likelihoods import Heads, Likelihood, Theta
from doxa.likelihoods import likelihood as resolve
from doxa.predictive.components import as_draws, cast_votes, complete_theta, draw_functions
from doxa.predictive.form import Form
from doxa.predictive.predictive import Predictive
from doxa.predictive.running import Average, Spread
from doxa.predictive.summary import HeadsForm, MomentForm


class Moments:
    """Streams chunks of draws into a predictive that keeps only moments:

        moments = Moments(likelihood)
        for f, theta in chunks:  # f [c, N, *output], theta {name: [c, *own]}
            moments.update(f, theta)
        p = moments.result()

    With `f_variance` and a likelihood that has no closed form for it, `draws` functions are
    drawn for each Gaussian; they depend on the seed and its number, not on the chunks.
    """

    def __init__(
        self,
        likelihood: str | Likelihood | Sequence[str | Likelihood],
        seed: int = 0,
        draws: int = 100,
    ) -> None:
        self.likelihood = resolve(likelihood).untempered()
        self.seed, self.draws, self.count = seed, draws, 0
        self._heads: list[Moments] = []
        if isinstance(self.likelihood, Heads):
            self._heads = [Moments(head, seed, draws) for head in self.likelihood.likelihoods]
        self._function, self._noise, self._marginal = Spread(), Average(), Average()
        self._entropy, self._votes = Average(), Average()

    def update(
        self,
        f: Any,
        theta: Theta | None = None,
        f_variance: Any = None,
        weights: Tensor | None = None,
    ) -> None:
        """Add c draws. Weights [c] count relative to those of other chunks; 1 when None."""
        if isinstance(self.likelihood, Heads):
            for i, head in enumerate(self._heads):
                own = self.likelihood.theta_of(i, theta or {})
                variance = None if f_variance is None else f_variance[i]
                head.update(f[i], own, variance, weights)
            return
        f, likelihood = as_draws(f), self.likelihood
        likelihood.event(tuple(f.shape[2:]))
        values = complete_theta(likelihood, theta, f)
        weights = f.new_ones(f.shape[0]) if weights is None else torch.as_tensor(weights).to(f)
        f_variance = None if f_variance is None else torch.as_tensor(f_variance).to(f)
        first, self.count = self.count, self.count + f.shape[0]
        if f_variance is not None and likelihood.integrates_normal:
            self._marginal.update(likelihood.location_variance(f_variance, 1), weights)
        elif f_variance is not None:
            f, values, weights = draw_functions(
                f, f_variance, values, weights, self.seed, self.draws, first
            )
        self._function.update(likelihood.mean(f, values, 1), weights)
        self._noise.update(likelihood.variance(f, values, 1), weights)
        self._entropy.update(likelihood.entropy(f, values, 1), weights)
        if likelihood.classifies:
            self._votes.update(cast_votes(likelihood, f), weights)

    def result(self) -> Predictive:
        return Predictive.of(self._result())

    def _result(self) -> Form:
        if self._heads:
            return HeadsForm(self.likelihood, [head._result() for head in self._heads])
        if self.count == 0:
            raise DataError("no draws were added: call update first")
        epistemic = self._function.variance
        if self._marginal.weight is not None:
            epistemic = epistemic + self._marginal.mean
        return MomentForm(
            self.likelihood,
            self._function.mean,
            self._noise.mean,
            epistemic,
            self._entropy.mean,
            self._votes.mean if self.likelihood.classifies else None,
        )
