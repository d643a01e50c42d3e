"""A predictive spread out or drawn together about its mean.

    y' = m + s (y - m):    p'(y) = p(m + (y - m) / s) / s,    Var' = s² Var

Means stay, standard deviations are multiplied by s, and the shape is kept.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from doxa.predictive.form import Form


class Rescaled(Form):
    """A form of continuous y and its factor s, [*event] or a number."""

    def __init__(self, base: Form, factor: Tensor) -> None:
        self.base, self.likelihood = base, base.likelihood
        self.factor = factor.to(base.mean)

    @property
    def mean(self) -> Tensor:
        return self.base.mean

    @property
    def aleatoric(self) -> Tensor:
        return self.factor.square() * self.base.aleatoric

    @property
    def epistemic(self) -> Tensor:
        return self.factor.square() * self.base.epistemic

    @property
    def expected_entropy(self) -> Tensor:
        return self.base.expected_entropy + self.factor.log()

    @property
    def marginal_entropy(self) -> Tensor:
        return self.base.marginal_entropy + self.factor.log()

    @property
    def samples(self) -> Tensor:
        return self.mean + self.factor * (self.base.samples - self.mean)

    @property
    def weights(self) -> Tensor:
        return self.base.weights

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        weights, means, stds = self.base.normals()
        return weights, self.mean + self.factor * (means - self.mean), self.factor * stds

    def targets(self, y: Any) -> Tensor:
        return self.base.targets(y)

    def log_prob(self, y: Tensor) -> Tensor:
        log_factor = self.factor.log().expand(self.mean.shape[1:]).sum()
        return self.base.log_prob(self._back(y)) - log_factor

    def cdf(self, y: Tensor) -> Tensor:
        return self.base.cdf(self._back(y))

    def quantile(self, level: float) -> Tensor:
        return self.mean + self.factor * (self.base.quantile(level) - self.mean)

    def quantiles(self, levels: Tensor) -> Tensor:
        return self.mean + self.factor * (self.base.quantiles(levels) - self.mean)

    def sample(self, n: int, seed: int) -> Tensor:
        return self.mean + self.factor * (self.base.sample(n, seed) - self.mean)

    def _back(self, y: Tensor) -> Tensor:
        """Where the base has what this one has at y."""
        return self.mean + (y - self.mean) / self.factor
