"""What the forms of a predictive share: everything that follows from a few of its quantities.

A form overrides what it has; the rest raises `Unavailable` and says what to do instead.
`Predictive` documents the quantities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from doxa.errors import DataError, ShapeError, Unavailable
from doxa.likelihoods import Bernoulli, Likelihood


class Form:
    """A distribution of y at N rows."""

    likelihood: Likelihood
    only_moments: ClassVar[bool] = False  # nothing is known of y but its moments

    @property
    def mean(self) -> Tensor:
        raise self.unavailable("mean")

    @property
    def aleatoric(self) -> Tensor:
        raise self.unavailable("aleatoric")

    @property
    def epistemic(self) -> Tensor:
        raise self.unavailable("epistemic")

    @property
    def expected_entropy(self) -> Tensor:
        raise self.unavailable("expected_entropy")

    @property
    def samples(self) -> Tensor:
        raise self.unavailable("samples")

    @property
    def weights(self) -> Tensor:
        raise self.unavailable("weights")

    @property
    def heads(self) -> tuple[Form, ...]:
        raise self.unavailable("heads", "the model has one head: ask the predictive itself")

    def votes(self) -> Tensor:
        raise self.unavailable("votes", "it is for classification")

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        raise self.unavailable("normals", "its components are not normal, or were not kept")

    def targets(self, y: Any) -> Tensor:
        """y checked against the rows and outputs of this predictive, on its device."""
        raise self.unavailable("log_prob")

    def log_prob(self, y: Tensor) -> Tensor:
        """Of checked targets: [N]."""
        raise self.unavailable("log_prob")

    def cdf(self, y: Tensor) -> Tensor:
        """At checked targets: [N, *event]."""
        raise self.unavailable("cdf")

    def quantile(self, level: float) -> Tensor:
        raise self.unavailable("quantile")

    def quantiles(self, levels: Tensor) -> Tensor:
        """At many levels [L] at once: [L, N, *event]."""
        return torch.stack([self.quantile(level) for level in levels.tolist()])

    def sample(self, n: int, seed: int) -> Tensor:
        raise self.unavailable("sample")

    def interval(self, level: float | None) -> tuple[Tensor, Tensor]:
        level = 0.95 if level is None else level
        return self.quantile(0.5 * (1.0 - level)), self.quantile(0.5 * (1.0 + level))

    def prediction_set(self, level: float | None) -> Tensor:
        """Classes by falling probability, the lower number first among equals, until their mass
        reaches the level: bool [N, C, *site]."""
        probs = self.class_table()
        if not bool(torch.isfinite(probs).all()):
            raise DataError("the predicted probabilities are not finite: there is no set to give")
        ordered, order = probs.sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(1) - ordered
        chosen = before < (0.95 if level is None else level)
        return torch.zeros_like(chosen).scatter(1, order, chosen)

    def class_table(self) -> Tensor:
        """Class probabilities with the classes on axis 1, in float64: [N, C, *site]; [N, 2,
        *event] for Bernoulli, which has no and yes."""
        if not self.likelihood.classifies:
            raise self.unavailable("prediction_set", "it is for classification; use interval")
        probs = self.probs.double()
        if isinstance(self.likelihood, Bernoulli):
            return torch.stack([1.0 - probs, probs], 1)
        return probs

    @property
    def variance(self) -> Tensor:
        try:
            return self.aleatoric + self.epistemic
        except Unavailable:
            if not self.likelihood.classifies:
                raise
            return self.mean * (1.0 - self.mean)  # of a class, whatever its parts

    @property
    def entropy(self) -> Tensor:
        try:
            return self.expected_entropy + self.mutual_information
        except Unavailable:
            if not self.likelihood.classifies:
                raise
            return self.marginal_entropy

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    @property
    def marginal_entropy(self) -> Tensor:
        """H[y] computed directly; of classes it follows from the mean."""
        if not self.likelihood.classifies:
            raise self.unavailable(
                "entropy",
                "a mixture of densities has no closed form for it; moment_matched().entropy is "
                "an upper bound",
            )
        return self.likelihood.entropy_of(self.mean)

    @property
    def mutual_information(self) -> Tensor:
        # Rounding may take the difference below zero, where it can never be.
        return (self.marginal_entropy - self.expected_entropy).clamp_min(0.0)

    @property
    def probs(self) -> Tensor:
        if not self.likelihood.classifies:
            raise self.unavailable("probs", "it is for classification; use mean and std")
        return self.mean

    @property
    def variation_ratio(self) -> Tensor:
        probs = self.probs
        if isinstance(self.likelihood, Bernoulli):
            return torch.minimum(probs, 1.0 - probs)
        return 1.0 - probs.amax(1)

    def check_ordered(self, quantity: str) -> None:
        if self.likelihood.classifies:
            raise self.unavailable(quantity, "classes have no order; use probs")

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        reason = f": {instead}" if instead else ""
        return Unavailable(f"this {self.likelihood.name} predictive has no {quantity}{reason}")


def check_rows(y: Tensor, rows: int) -> Tensor:
    if y.shape[0] != rows:
        raise ShapeError(f"{y.shape[0]} targets for predictions at {rows} rows")
    return y


def check_weights(weights: Any, count: int, like: Tensor, what: str) -> Tensor:
    """[count] non-negative weights that sum to 1; equal ones when None."""
    if weights is None:
        return torch.full((count,), 1.0 / count, dtype=like.dtype, device=like.device)
    weights = torch.as_tensor(weights).to(device=like.device, dtype=like.dtype)
    if weights.shape != (count,):
        raise ShapeError(f"{count} {what} need {count} weights, got shape {list(weights.shape)}")
    total: Tensor = weights.sum()
    if not bool((weights >= 0).all() & (total > 0) & torch.isfinite(total)):
        raise DataError("weights must be non-negative, finite and not all zero")
    normalised: Tensor = weights / total
    return normalised


def mix(values: Sequence[Tensor] | Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over the first axis (or over a sequence)."""
    stacked = values if isinstance(values, Tensor) else torch.stack(list(values))
    if bool((weights == 0).any()):  # what counts nothing may be infinite or undefined
        counted = (weights > 0).reshape(-1, *[1] * (stacked.ndim - 1))
        stacked = torch.where(counted, stacked, 0.0)
    table = stacked.reshape(stacked.shape[0], math.prod(stacked.shape[1:]))
    return torch.mv(table.t(), weights.to(table.dtype)).reshape(stacked.shape[1:])


def systematic(weights: Tensor, n: int, source: Generator) -> Tensor:
    """[n] indices, shuffled; each comes up n w times, to within one (systematic resampling)."""
    grid = (torch.arange(n) + torch.rand((), generator=source)).double() / n
    bounds = weights.detach().double().cpu().cumsum(0)
    chosen = torch.searchsorted(bounds, grid, right=True).clamp_max(len(bounds) - 1)
    return chosen[torch.randperm(n, generator=source)]
