"""The weighted mixture of predictives of any form: Bayesian model averaging.

p(y) = sum_k w_k p_k(y),    Var_f E[y | f] = sum_k w_k (epistemic_k + (mean_k - mean)^2)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError, ModelError, ShapeError
from doxa.noise import digest, generator
from doxa.predictive.form import (
    Form,
    HeadsForm,
    bisect_whole,
    check_weights,
    mix,
    solve,
    systematic,
)


class Blend(Form):
    """A weighted mixture of forms at the same rows, in the same units."""

    def __init__(self, parts: Sequence[Form], weights: Tensor) -> None:
        self.parts, self.part_weights = tuple(parts), weights
        self.likelihood = parts[0].likelihood

    @property
    def splits(self) -> bool:
        return all(part.splits for part in self.parts)

    @property
    def has_samples(self) -> bool:
        return all(part.has_samples for part in self.parts)

    @property
    def mean(self) -> Tensor:
        return self._mix([part.mean for part in self.parts])

    @property
    def aleatoric(self) -> Tensor:
        return self._mix([part.aleatoric for part in self.parts])

    @property
    def epistemic(self) -> Tensor:
        mean = self.mean
        return self._mix([part.epistemic + (part.mean - mean).square() for part in self.parts])

    @property
    def expected_entropy(self) -> Tensor:
        return self._mix([part.expected_entropy for part in self.parts])

    @property
    def samples(self) -> Tensor:
        return torch.cat([part.samples for part in self.parts])

    @property
    def weights(self) -> Tensor:
        own = zip(self.parts, self.part_weights, strict=True)
        return torch.cat([weight * part.weights for part, weight in own])

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        each = [part.normals() for part in self.parts]
        weights = [w * own[0] for own, w in zip(each, self.part_weights, strict=True)]
        means, stds = (torch.cat([own[i] for own in each]) for i in (1, 2))
        return torch.cat(weights), means, stds

    def votes(self) -> Tensor:
        return self._mix([part.votes() for part in self.parts])

    def log_prob(self, y: Tensor) -> Tensor:
        each = torch.stack([part.log_prob(y) for part in self.parts])
        return torch.logsumexp(each + self.part_weights.log().unsqueeze(1), 0)

    def targets(self, y: Any) -> Tensor:
        return self.parts[0].targets(y)

    def cdf(self, y: Tensor) -> Tensor:
        return self._mix([part.cdf(y) for part in self.parts])

    def quantile(self, level: float) -> Tensor:
        each = torch.stack([part.quantile(level) for part in self.parts])
        low, high = each.amin(0), each.amax(0)  # the quantile of the mixture lies in between
        if self.likelihood.discrete:
            return bisect_whole(self.cdf, level, low - 1.0, high)
        return solve(self.cdf, level, low, high)

    def sample(self, n: int, seed: int) -> Tensor:
        chosen = systematic(self.part_weights, n, generator(seed, "predictive", "part"))
        draws: Tensor | None = None
        for k, part in enumerate(self.parts):
            places = (chosen == k).nonzero().squeeze(1)
            if len(places) == 0:
                continue
            own = part.sample(len(places), part_seed(seed, k))
            if draws is None:
                draws = own.new_empty((n, *own.shape[1:]))
            draws[places.to(own.device)] = own
        assert draws is not None
        return draws

    def _mix(self, values: Sequence[Tensor]) -> Tensor:
        return mix(values, self.part_weights)


def part_seed(seed: int, k: int) -> int:
    """The seed of part k of a mixture, so that equal parts have different draws."""
    return digest("part", seed, k) & 0x7FFFFFFF


def blend(parts: Sequence[Form], weights: Any) -> Form:
    """See `Predictive.mix`."""
    if not parts:
        raise DataError("there are no predictives to mix")
    first = parts[0]
    if isinstance(first, HeadsForm):
        blocks = zip(*(part.heads for part in parts), strict=True)
        return HeadsForm(first.likelihood, [blend(block, weights) for block in blocks])
    for part in parts[1:]:
        same = part.likelihood.classifies == first.likelihood.classifies
        if not same or part.likelihood.discrete != first.likelihood.discrete:
            raise ModelError(
                f"a {first.likelihood.name} and a {part.likelihood.name} predictive are about "
                "different kinds of targets and cannot be mixed"
            )
        if part.mean.shape != first.mean.shape:
            raise ShapeError(
                f"predictives of shapes {list(first.mean.shape)} and {list(part.mean.shape)} "
                "cannot be mixed"
            )
    return Blend(parts, check_weights(weights, len(parts), first.mean, "predictives"))
