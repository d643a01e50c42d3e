"""`Predictive`, the distribution of y at inputs x, and `Moments`, which streams draws into one.

For regression the law of total variance splits the spread of y over the draws s of the function,

    Var[y] = E_s Var[y | f_s]  +  Var_s E[y | f_s]
    total  = aleatoric         +  epistemic

For classification, the entropy splits in the same way, H[y] = E_s H[y | f_s] + I[y; f], where the
second term is the mutual information (BALD). Both equations hold exactly, because the left side is
computed as the sum. Variances over draws use 1/S, not 1/(S-1).

`Average`, `Spread` and `Moments` accumulate moments over chunks of draws, without keeping the
draws. With accumulated weight W and mean m, a chunk of weight w and mean m' is merged by (Chan,
Golub and LeVeque, 1979), a = w / (W + w):

    m <- (1 - a) m + a m',    v <- (1 - a) v + a v' + a (1 - a) (m' - m)^2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from doxa import describe
from doxa.errors import DataError, ShapeError
from doxa.likelihoods import Categorical, Heads, Likelihood, Theta
from doxa.likelihoods import likelihood as resolve
from doxa.predictive.blend import blend
from doxa.predictive.form import (
    Form,
    HeadsForm,
    MomentForm,
    as_draws,
    cast_votes,
    complete_theta,
    concatenate,
    draw_functions,
    mix,
    moment_matched,
)
from doxa.predictive.mixture import build

LikelihoodSpec = str | Likelihood | Sequence[str | Likelihood]


class Predictive(describe.Described):
    """p(y | x, data) at N inputs, in units of y: a mixture of S functions, or of S Gaussian
    marginals over functions.

    The rows N are the first axis of all quantities, and the second of draws. Where the fit was
    given y of shape [N], quantities have the shape [N], and draws [S, N]; with y of shape [N, 1]
    they have [N, 1] and [S, N, 1] (`event` below is () or (1,)). A quantity that this distribution
    does not have raises `Unavailable` (an AttributeError, so that `hasattr` is False), with advice
    in the message.

    Parameters
    ----------
    f : Tensor, or tuple of Tensor
        Network outputs of each draw, [S, N, *output]; a tuple of them for several heads. Half
        precision is converted to float32.
    likelihood : str, Likelihood, or sequence of them
        A sequence for several heads; `Affine` if f is in fitted units.
    theta : dict of Tensor, optional
        Learned likelihood parameters, [S, *own] or [*own]. Fixed ones (noise=0.1) are part of the
        likelihood.
    f_variance : Tensor, optional
        [S, N, *output]: f is then the mean of a Gaussian for each draw, row and output. This is a
        closed form with a Gaussian likelihood; otherwise `draws` functions are drawn for each of
        the S components, from `seed`.
    weights : Tensor, optional
        [S], normalised; equal weights by default.
    """

    _scalar: bool | tuple[bool, ...] = False  # y has no output axis, but the form has one of size 1

    def __init__(
        self,
        f: Any,
        likelihood: LikelihoodSpec,
        theta: Mapping[str, Tensor] | None = None,
        *,
        f_variance: Any = None,
        weights: Any = None,
        seed: int = 0,
        draws: int = 100,
    ) -> None:
        self._form: Form = build(f, likelihood, theta, f_variance, weights, seed, draws)

    @classmethod
    def of(cls, form: Form) -> Predictive:
        """A predictive of another form: moments, a normal, a mixture of predictives."""
        new = cls.__new__(cls)
        new._form = form
        return new

    @property
    def form(self) -> Form:
        """The representation of this distribution, for transforms and scores inside doxa that need
        more than the quantities below: draws, log-probabilities, the base of a correction.

        A form always has an output axis, also where y has none; `of_form` makes a predictive of the
        same targets from another form. The classes of forms may change between versions.
        """
        return self._form

    def for_targets(self, scalar: bool | tuple[bool, ...]) -> Predictive:
        """The same distribution for targets of shape [N], where `scalar` is True (per head): the
        output axis of the form is then hidden."""
        new = Predictive.of(self.form)
        new._scalar = scalar
        return new

    def of_form(self, form: Form) -> Predictive:
        """Another form for the same targets."""
        return Predictive.of(form).for_targets(self._scalar)

    def _shown(self, values: Tensor) -> Tensor:
        """Values [..., *event] of the form, in the shape of y."""
        return values.squeeze(-1) if self._scalar else values

    @classmethod
    def from_samples(
        cls,
        f: Any,
        likelihood: LikelihoodSpec,
        theta: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> Predictive:
        """A predictive from any function draws [S, N, *output]; the same as calling the class."""
        return cls(f, likelihood, theta, **options)

    @classmethod
    def from_probs(cls, probs: Any, weights: Any = None) -> Predictive:
        """A predictive from any class probabilities: [N, C] of one model, [S, N, C, *site] of S
        models. `samples` are then their logarithms."""
        table = torch.as_tensor(probs)
        table = as_draws(table[None] if table.ndim == 2 else table)
        if table.ndim < 3:
            raise ShapeError(f"probs must be [N, C] or [S, N, C], got {list(table.shape)}")
        total = table.sum(2)
        wrong = ~((total - 1.0).abs() <= 1e-3) | (table < 0).any(2)
        if bool(wrong.any()):
            row = wrong.nonzero()[0].tolist()[1]
            raise DataError(
                f"row {row} of probs is not a distribution: negative, or not summing to 1 over the "
                "classes"
            )
        logits = (table / total.unsqueeze(2)).log()
        return cls(logits, Categorical(), weights=weights)

    @classmethod
    def mix(cls, parts: Sequence[Predictive], weights: Any = None) -> Predictive:
        """The weighted mixture of predictives at the same rows (model averaging). Their fitted
        units may differ."""
        mixed = cls.of(blend([part.form for part in parts], weights))
        return mixed.for_targets(_common([part._scalar for part in parts]))

    @classmethod
    def concat(cls, parts: Sequence[Predictive]) -> Predictive:
        """Moments of consecutive blocks of rows as one predictive."""
        joined = cls.of(concatenate([part.form for part in parts]))
        return joined.for_targets(_common([part._scalar for part in parts]))

    def described(self) -> describe.Words:
        return describe.predictive(self)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, without class weights."""
        return self.form.likelihood

    @property
    def classifies(self) -> bool:
        """Whether y is a class: `probs` and `entropy` are there, `interval` and `cdf` are not."""
        return self.likelihood.classifies

    @property
    def guaranteed_level(self) -> float | None:
        """The level for which conformal prediction calibrated the interval or set; None for any
        other predictive."""
        return self.form.guaranteed_level

    @property
    def has_samples(self) -> bool:
        """Whether `samples`, the draws of functions, are there. They are not if only moments were
        kept, in closed form, and after a recalibration."""
        return self.form.has_samples

    @property
    def splits(self) -> bool:
        """Whether the uncertainty splits into `epistemic` and `aleatoric`, and for classes into
        `mutual_information` and `expected_entropy`."""
        return self.form.splits

    @property
    def mean(self) -> Tensor:
        """E[y]: [N, *event]; for a categorical the class probabilities [N, C, *site]."""
        return self._shown(self.form.mean)

    @property
    def aleatoric(self) -> Tensor:
        """E_s Var[y | f_s], in the shape of `mean`: the noise that more data would not remove."""
        return self._shown(self.form.aleatoric)

    @property
    def epistemic(self) -> Tensor:
        """Var_s E[y | f_s], in the shape of `mean`: the disagreement between functions."""
        return self._shown(self.form.epistemic)

    @property
    def variance(self) -> Tensor:
        """aleatoric + epistemic, where the variance splits; p (1 − p) for classes."""
        return self._shown(self.form.variance)

    @property
    def std(self) -> Tensor:
        return self._shown(self.form.std)

    @property
    def probs(self) -> Tensor:
        """Class probabilities [N, C, *site]; for Bernoulli P(y = 1), in the shape of y."""
        return self._shown(self.form.probs)

    @property
    def expected_entropy(self) -> Tensor:
        """E_s H[y | f_s] of each label or element of y, in nats: [N, *event]."""
        return self._shown(self.form.expected_entropy)

    @property
    def mutual_information(self) -> Tensor:
        """I[y; f] in nats, never negative: the information of a label about the function."""
        return self._shown(self.form.mutual_information)

    @property
    def entropy(self) -> Tensor:
        """H[y] in nats: expected_entropy + mutual_information, where the entropy splits."""
        return self._shown(self.form.entropy)

    @property
    def variation_ratio(self) -> Tensor:
        """One minus the largest class probability; `votes` gives the variation ratio by
        counting."""
        return self._shown(self.form.variation_ratio)

    def votes(self) -> Tensor:
        """The share of the draws that rank each class first: [N, C, *site]; for Bernoulli the
        share above one half. `1 - votes().amax(1)` is the variation ratio by counting."""
        return self._shown(self.form.votes())

    @property
    def samples(self) -> Tensor:
        """[S, N, ...]: samples[s] is one function at all rows, in units of y; logits for
        classification, log rates for counts."""
        return self._shown(self.form.samples)

    @property
    def weights(self) -> Tensor:
        """The weight of each sample, [S]; the weights sum to 1."""
        return self.form.weights

    @property
    def heads(self) -> tuple[Predictive, ...]:
        """One predictive for each head of a model; the predictive itself where there is one."""
        if not isinstance(self.form, HeadsForm):
            return (self,)
        heads = self.form.heads
        scalar = self._scalar if isinstance(self._scalar, tuple) else (False,) * len(heads)
        each = zip(heads, scalar, strict=True)
        return tuple(Predictive.of(head).for_targets(own) for head, own in each)

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        """(weights [S], means [S, N, *event], standard deviations) where y is a mixture of
        normals. Closed forms (CRPS) are computed from them."""
        weights, means, stds = self.form.normals()
        return weights, self._shown(means), self._shown(stds)

    def targets(self, y: Any) -> Tensor:
        """y as a tensor on the device, checked against the rows and outputs: [N, *event], the shape
        of `mean`. With one output, y may have the shape [N] or [N, 1]. Classes are int64."""
        return self._shown(self.form.targets(y))

    def cdf(self, y: Any) -> Tensor:
        """P(Y <= y) of each element: [N, *event]. Not for classes."""
        self.form.check_ordered("cdf")
        return self._shown(self.form.cdf(self.form.targets(y)))

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The q-quantile of each element of y: [N, *event], or [Q, N, *event] for a sequence."""
        self.form.check_ordered("quantile")
        try:
            levels = torch.as_tensor(q, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            levels = torch.tensor(torch.nan)
        if levels.ndim > 1 or not bool(((levels > 0) & (levels < 1)).all()):
            raise DataError(f"quantile levels must lie between 0 and 1, got {q}")
        if levels.ndim == 0:
            return self._shown(self.form.quantile(float(levels)))
        return self._shown(torch.stack([self.form.quantile(q) for q in levels.tolist()]))

    def interval(self, level: float | None = None) -> tuple[Tensor, Tensor]:
        """The central interval (low, high) that holds y with probability `level`, 0.95 by default.
        A conformal predictive has only the interval of its calibrated level."""
        self.form.check_ordered("interval")
        low, high = self.form.interval(_checked(level))
        return self._shown(low), self._shown(high)

    def prediction_set(self, level: float | None = None) -> Tensor:
        """The smallest set of classes that holds y with probability `level`, 0.95 by default: bool
        [N, C, *site]; for Bernoulli [N, 2, *event], of 0 and 1. A conformal predictive has only the
        set of its calibrated level."""
        return self._shown(self.form.prediction_set(_checked(level)))

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """n draws of y: [n, N, *event]. Each is one function at all rows plus noise, where the
        functions were kept; otherwise rows are drawn independently."""
        if not isinstance(n, Integral) or n < 1:
            raise DataError(f"n must be a whole number, at least 1, got {n!r}")
        return self._shown(self.form.sample(n, seed))

    def log_prob(self, y: Any) -> Tensor:
        """log p(y) of each row, [N], summed over its outputs; y is in its original units. Class
        weights are not used, and ignored labels contribute 0."""
        return self.form.log_prob(self.form.targets(y))

    def moment_matched(self) -> Predictive:
        """The Gaussian with this mean and variance, as scored in the deep-ensembles paper."""
        return self.of_form(moment_matched(self.form))


def _common(scalar: Sequence[bool | tuple[bool, ...]]) -> bool | tuple[bool, ...]:
    """The common value of all parts; False, the shape of the form, where they differ."""
    return scalar[0] if all(own == scalar[0] for own in scalar) else False


def _checked(level: float | None) -> float | None:
    number = float(level) if isinstance(level, Real) else float("nan")
    if level is not None and not 0.0 < number < 1.0:
        raise DataError(f"level must lie between 0 and 1, got {level!r}")
    return level


class Average:
    """The weighted mean of values that come in chunks [c, ...]."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.mean: Tensor

    def update(self, values: Tensor, weights: Tensor) -> None:
        total, mean = weights.sum(), _average(values, weights)
        if self.weight is None:
            self.weight, self.mean = total, mean
            return
        share = _share(total, self.weight).to(mean.dtype)
        self.mean = (1.0 - share) * self.mean + share * mean
        self.weight = self.weight + total


class Spread(Average):
    """The weighted mean and variance of values that come in chunks [c, ...]."""

    variance: Tensor

    def update(self, values: Tensor, weights: Tensor) -> None:
        mean = _average(values, weights)
        variance = _average((values - mean).square(), weights)
        if self.weight is None:
            self.variance = variance
        else:
            share = _share(weights.sum(), self.weight).to(mean.dtype)
            between = (mean - self.mean).square()
            self.variance = (1.0 - share) * (self.variance + share * between) + share * variance
        super().update(values, weights)


def _share(new: Tensor, old: Tensor) -> Tensor:
    return new / (old + new).clamp_min(torch.finfo(new.dtype).tiny)


def _average(values: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)  # a chunk may have weight zero
    return mix(values, (weights / total).to(values.dtype))


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
