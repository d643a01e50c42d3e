"""Forms that hold moments, not draws: streamed ones, normal ones, several heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from doxa.errors import MethodError, Unavailable
from doxa.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from doxa.likelihoods.gaussian import HALF_LOG_2PI, standard_normal_cdf
from doxa.noise import generator
from doxa.predictive.form import Form, check_rows
from doxa.predictive.quantiles import normal_quantile


class Summary(Form):
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


class MomentForm(Summary):
    """What `Moments` leaves: the draws were not kept, so that nothing beyond moments is known,
    except for single labels, whose distribution is their mean."""

    only_moments = True

    def log_prob(self, y: Tensor) -> Tensor:
        return self.likelihood.log_prob(self._single_label("log_prob"), y, {})

    def targets(self, y: Any) -> Tensor:
        # Of continuous likelihoods only the mean's shape is known, which is the targets' own.
        kind = self.likelihood if self.likelihood.discrete else Gaussian()
        ready = kind.prepare_targets(y, tuple(self.mean.shape[1:])).to(self.mean.device)
        return check_rows(ready, self.mean.shape[0])

    def sample(self, n: int, seed: int) -> Tensor:
        logits = self._single_label("sample")
        source = generator(seed, "predictive", "sample")
        return self.likelihood.sample(logits.expand(n, *logits.shape), {}, source, 1)

    def _single_label(self, quantity: str) -> Tensor:
        if math.prod(self.expected_entropy.shape[1:]) != 1:
            raise self.unavailable(quantity)
        if isinstance(self.likelihood, Bernoulli | Categorical):
            return self.likelihood.logits(self.mean)
        raise self.unavailable(quantity)

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        if not instead:
            instead = "only moments were kept; predict with keep='samples'"
            if not self.likelihood.discrete:
                instead += ", or use moment_matched(), the Gaussian with these moments"
        return super().unavailable(quantity, instead)


class NormalForm(Summary):
    """Normal, with given moments, each element of y by itself."""

    @property
    def marginal_entropy(self) -> Tensor:
        return self.std.log() + (HALF_LOG_2PI + 0.5)

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mean.new_ones(1), self.mean.unsqueeze(0), self.std.unsqueeze(0)

    def targets(self, y: Any) -> Tensor:
        ready = Gaussian().prepare_targets(y, tuple(self.mean.shape[1:])).to(self.mean.device)
        return check_rows(ready, self.mean.shape[0])

    def log_prob(self, y: Tensor) -> Tensor:
        z = ((y - self.mean) / self.std).to(self.mean.dtype)
        each = -0.5 * z.square() - self.std.log() - HALF_LOG_2PI
        return each.reshape(each.shape[0], math.prod(each.shape[1:])).sum(1)

    def cdf(self, y: Tensor) -> Tensor:
        return standard_normal_cdf((y - self.mean) / self.std).to(self.mean.dtype)

    def quantile(self, level: float) -> Tensor:
        return self.mean + self.std * normal_quantile(level)

    def sample(self, n: int, seed: int) -> Tensor:
        source = generator(seed, "predictive", "sample")
        noise = torch.randn((n, *self.mean.shape), generator=source, dtype=self.mean.dtype)
        return self.mean + self.std * noise.to(self.mean.device)

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super().unavailable(quantity, instead or "it is one normal distribution")


class HeadsForm(Form):
    """Several heads, a predictive each; nothing is asked of them together."""

    def __init__(self, likelihood: Likelihood, heads: Sequence[Form]) -> None:
        self.likelihood = likelihood
        self._heads = tuple(heads)

    @property
    def heads(self) -> tuple[Form, ...]:
        return self._heads

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super().unavailable(
            quantity, f"it has {len(self._heads)} heads; ask each, as in heads[0].{quantity}"
        )


def moments(form: Form) -> Form:
    """What `Moments` would leave of a form, by its own averages."""
    if isinstance(form, HeadsForm):
        return HeadsForm(form.likelihood, [moments(head) for head in form.heads])
    votes = form.votes() if form.likelihood.classifies else None
    own = (form.mean, form.aleatoric, form.epistemic, form.expected_entropy)
    return MomentForm(form.likelihood, *own, votes)


def moment_matched(p: Form) -> Form:
    """The normal with the same moments."""
    if isinstance(p, HeadsForm):
        return HeadsForm(p.likelihood, [moment_matched(head) for head in p.heads])
    if p.likelihood.discrete:
        raise p.unavailable("moment_matched", "it is for continuous targets")
    return NormalForm(p.likelihood, p.mean, p.aleatoric, p.epistemic, p.expected_entropy)


def concatenate(parts: Sequence[Form]) -> Form:
    """Moments of consecutive blocks of rows as one form."""
    first = parts[0]
    if isinstance(first, HeadsForm):
        blocks = zip(*(part.heads for part in parts), strict=True)
        return HeadsForm(first.likelihood, [concatenate(block) for block in blocks])
    summaries = [part for part in parts if isinstance(part, Summary)]
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
