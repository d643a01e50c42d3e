"""Predictives that hold moments, not draws: streamed ones, normal ones, several heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from doxa.errors import MethodError, Unavailable
from doxa.likelihoods import Gaussian, Likelihood
from doxa.likelihoods.gaussian import HALF_LOG_2PI
from doxa.predictive.base import Predictive, check_levels, check_rows, generator


class _Summary(Predictive):
    """Mean, variances and expected entropy as given."""

    def __init__(
        self,
        likelihood: Likelihood,
        mean: Tensor,
        aleatoric: Tensor,
        epistemic: Tensor,
        expected_entropy: Tensor,
        votes: Tensor | None = None,
    ) -> None:
        self.likelihood = likelihood
        self._mean, self._aleatoric, self._epistemic = mean, aleatoric, epistemic
        self._expected_entropy, self._votes = expected_entropy, votes

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def aleatoric(self) -> Tensor:
        return self._aleatoric

    @property
    def epistemic(self) -> Tensor:
        return self._epistemic

    @property
    def expected_entropy(self) -> Tensor:
        return self._expected_entropy

    def votes(self) -> Tensor:
        return super().votes() if self._votes is None else self._votes


class MomentPredictive(_Summary):
    """What `Moments` leaves: the draws were not kept, so that nothing beyond moments is known,
    except for single labels, whose distribution is their mean."""

    def log_prob(self, y: Any) -> Tensor:
        return self._single_label("log_prob").log_prob(y)

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """n draws of y, each row by itself; classification with one label a row only."""
        return self._single_label("sample").sample(n, seed)

    def _single_label(self, quantity: str) -> Predictive:
        labels = math.prod(self.expected_entropy.shape[1:])
        if not self.likelihood.classifies or labels != 1:
            raise self._unavailable(quantity)
        return Predictive.from_samples(self.likelihood.logits(self.mean)[None], self.likelihood)

    def _unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        if not instead:
            instead = "only moments were kept; predict with keep='samples'"
            if not self.likelihood.discrete:
                instead += ", or use moment_matched(), the Gaussian with these moments"
        return super()._unavailable(quantity, instead)


class NormalPredictive(_Summary):
    """Normal, with given moments, each element of y by itself."""

    @property
    def _marginal_entropy(self) -> Tensor:
        return 0.5 * self.variance.log() + (HALF_LOG_2PI + 0.5)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        levels = check_levels(q, self.mean)
        z = torch.special.ndtri(levels).reshape(levels.shape + (1,) * self.mean.ndim)
        return self.mean + self.std * z

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """n draws of y, each element by itself: [n, N, *event]."""
        shape = (n, *self.mean.shape)
        noise = torch.randn(shape, generator=generator(seed, "sample"), dtype=self.mean.dtype)
        return self.mean + self.std * noise.to(self.mean.device)

    def log_prob(self, y: Any) -> Tensor:
        y = Gaussian().prepare_targets(y, tuple(self.mean.shape[1:])).to(self.mean.device)
        check_rows(y, self.mean.shape[0])
        residual = (y - self.mean).to(self.mean.dtype)
        each = residual.square() / self.variance + self.variance.log() + 2.0 * HALF_LOG_2PI
        return -0.5 * each.reshape(each.shape[0], math.prod(each.shape[1:])).sum(1)

    def moment_matched(self) -> Predictive:
        return self

    def _unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super()._unavailable(quantity, instead or "it is a normal distribution, no mixture")


class HeadsPredictive(Predictive):
    """Several heads: a predictive each, under `heads`."""

    def __init__(self, likelihood: Likelihood, heads: Sequence[Predictive]) -> None:
        self.likelihood = likelihood
        self._heads = tuple(heads)

    @property
    def heads(self) -> tuple[Predictive, ...]:
        return self._heads

    def moment_matched(self) -> Predictive:
        return HeadsPredictive(self.likelihood, [head.moment_matched() for head in self._heads])

    def _unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super()._unavailable(
            quantity, f"it has {len(self._heads)} heads; ask each, as in heads[0].{quantity}"
        )


def concatenate(parts: Sequence[Predictive]) -> Predictive:
    """Moments of consecutive blocks of rows as one predictive."""
    first = parts[0]
    if isinstance(first, HeadsPredictive):
        blocks = zip(*(part.heads for part in parts), strict=True)
        return HeadsPredictive(first.likelihood, [concatenate(block) for block in blocks])
    summaries = [part for part in parts if isinstance(part, _Summary)]
    if len(summaries) < len(parts) or any(type(part) is not type(first) for part in parts):
        raise MethodError("only predictives that keep moments can be joined by rows")
    votes = [part._votes for part in summaries if part._votes is not None]
    return type(summaries[0])(
        first.likelihood,
        torch.cat([part.mean for part in parts]),
        torch.cat([part.aleatoric for part in parts]),
        torch.cat([part.epistemic for part in parts]),
        torch.cat([part.expected_entropy for part in parts]),
        torch.cat(votes) if votes else None,
    )
