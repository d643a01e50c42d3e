"""The form that keeps its components: S functions, or S Gaussians over functions.

    p(y) = sum_s w_s p(y | f_s),    log p(y) = logsumexp_s(log w_s + log p(y | f_s))

With a Gaussian likelihood a Gaussian over f integrates out: N(y; m_s, sigma_s^2 + v_s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from doxa.errors import ShapeError
from doxa.likelihoods import Affine, Heads, Likelihood
from doxa.likelihoods import likelihood as resolve
from doxa.likelihoods.gaussian import HALF_LOG_2PI, standard_normal_cdf
from doxa.noise import generator
from doxa.predictive.form import (
    AffineForm,
    Form,
    HeadsForm,
    as_draws,
    bisect_whole,
    cast_votes,
    check_rows,
    check_weights,
    complete_theta,
    draw_functions,
    mix,
    solve,
    systematic,
    widen,
)

CHUNK_ELEMENTS = 1 << 24  # elements of f per chunk; temporaries are a few times as large


def build(
    f: Any,
    likelihood: str | Likelihood | Sequence[str | Likelihood],
    theta: Mapping[str, Tensor] | None,
    f_variance: Any,
    weights: Any,
    seed: int,
    draws: int,
) -> Form:
    """See `Predictive`."""
    likelihood = resolve(likelihood).untempered()
    if isinstance(likelihood, Heads):
        parts = likelihood.likelihoods
        variances = [None] * len(parts) if f_variance is None else f_variance
        if len(f) != len(parts) or len(variances) != len(parts):
            raise ShapeError(f"{len(parts)} heads have likelihoods, but outputs have {len(f)}")
        own = [likelihood.theta_of(i, theta or {}) for i in range(len(parts))]
        heads = zip(f, parts, own, variances, strict=True)
        return HeadsForm(likelihood, [build(*head, weights, seed, draws) for head in heads])
    f = as_draws(f)
    likelihood.event(tuple(f.shape[2:]))
    values = complete_theta(likelihood, theta, f)
    weights = check_weights(weights, f.shape[0], f, "draws")
    if f_variance is not None:
        f_variance = torch.as_tensor(f_variance)
        if f_variance.shape != f.shape:
            raise ShapeError(
                f"f_variance has shape {list(f_variance.shape)}, f {list(f.shape)}: they must agree"
            )
        f_variance = f_variance.to(f)
    if likelihood.classifies:  # logits at temperature 1 from here on
        f_variance = None if f_variance is None else likelihood.location_variance(f_variance, 1)
        f, likelihood = likelihood.location(f, 1), likelihood.plain()
    if f_variance is not None and not likelihood.integrates_normal:
        f, values, weights = draw_functions(f, f_variance, values, weights, seed, draws)
        f_variance = None
    given = own_form(likelihood, f, values, weights, f_variance)
    return Mixture(likelihood, f, values, weights, f_variance) if given is None else given


def own_form(
    likelihood: Likelihood,
    f: Tensor,
    theta: Mapping[str, Tensor],
    weights: Tensor,
    f_variance: Tensor | None,
) -> Form | None:
    """The form that the likelihood gives itself, in units of y; None if it gives none."""
    if not isinstance(likelihood, Affine):
        return likelihood.predictive(f, theta, weights, f_variance)
    fitted = own_form(likelihood.base, f, theta, weights, f_variance)
    return None if fitted is None else AffineForm(likelihood, fitted, tuple(f.shape[2:]))


class Mixture(Form):
    """The weighted mixture of S components."""

    def __init__(
        self,
        likelihood: Likelihood,
        f: Tensor,
        theta: Mapping[str, Tensor],
        weights: Tensor,
        f_variance: Tensor | None,
    ) -> None:
        self.likelihood = likelihood
        self.f, self.theta, self.f_variance = f, theta, f_variance
        self._weights = weights

    @property
    def weights(self) -> Tensor:
        return self._weights

    @property
    def has_samples(self) -> bool:
        return self.f_variance is None

    @property
    def samples(self) -> Tensor:
        if self.f_variance is not None:
            raise self.unavailable(
                "samples",
                "it is in closed form; draw functions with posterior.functions(x, n), or y with "
                "sample(n)",
            )
        return self.likelihood.location(self.f, 1)

    @cached_property
    def _exact(self) -> Mixture:
        """The same mixture in float64, where f is in fitted units.

        With a large offset of y, differences in float32 would lose digits.
        """
        if not isinstance(self.likelihood, Affine) or self.f.dtype == torch.float64:
            return self
        theta = {name: value.double() for name, value in self.theta.items()}
        variance = None if self.f_variance is None else self.f_variance.double()
        return Mixture(self.likelihood, self.f.double(), theta, self.weights.double(), variance)

    @property
    def mean(self) -> Tensor:
        return self._mean

    @cached_property
    def _mean(self) -> Tensor:
        return self._centre.to(self.f.dtype)

    @cached_property
    def _centre(self) -> Tensor:
        """The mean, in float64 where `_exact` is; weights in float32 sum to 1 up to 1e-7."""
        total = self._average(lambda part: part._exact._means())
        return total / self.weights.double().sum()

    def _means(self) -> Tensor:
        """The mean of each component: [S, N, *event]."""
        means: Tensor = self.likelihood.mean(self.f, self.theta, 1)
        return means

    @property
    def aleatoric(self) -> Tensor:
        return self._aleatoric

    @cached_property
    def _aleatoric(self) -> Tensor:
        return self._average(lambda part: part.likelihood.variance(part.f, part.theta, 1))

    @property
    def epistemic(self) -> Tensor:
        return self._epistemic

    @cached_property
    def _epistemic(self) -> Tensor:
        def spread(part: Mixture) -> Tensor:
            gap = part._exact._means() - self._centre
            if part.f_variance is None:
                return gap.square()
            return gap.square() + part.likelihood.location_variance(part.f_variance, 1)

        return self._average(spread).to(self.f.dtype)

    @property
    def expected_entropy(self) -> Tensor:
        return self._expected_entropy

    @cached_property
    def _expected_entropy(self) -> Tensor:
        return self._average(lambda part: part.likelihood.entropy(part.f, part.theta, 1))

    @property
    def marginal_entropy(self) -> Tensor:
        if self.likelihood.classifies or self.f.shape[0] > 1:
            return super().marginal_entropy
        if self.f_variance is None:  # one function: y follows the likelihood
            return self.expected_entropy
        return 0.5 * (self.aleatoric + self.epistemic).log() + (HALF_LOG_2PI + 0.5)

    def votes(self) -> Tensor:
        if not self.likelihood.classifies:
            return super().votes()
        return self._average(lambda part: cast_votes(part.likelihood, part.f))

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self.likelihood.is_normal:
            return super().normals()
        variance = self.likelihood.variance(self.f, self.theta, 1)
        if self.f_variance is not None:
            variance = variance + self.likelihood.location_variance(self.f_variance, 1)
        means = self._exact._means()
        return self.weights, means, variance.sqrt().to(means.dtype)

    def targets(self, y: Any) -> Tensor:
        y = self.likelihood.prepare_targets(y, tuple(self.f.shape[2:])).to(self.f.device)
        if y.is_floating_point() and not isinstance(self.likelihood, Affine):
            y = y.to(self.f.dtype)  # Affine standardises first, in its own precision
        return check_rows(y, self.f.shape[1])

    def log_prob(self, y: Tensor) -> Tensor:
        total: Tensor | None = None
        for part in self.chunks():
            weights = part.weights.unsqueeze(1)
            each = torch.where(weights > 0, part._log_probs(y) + weights.log(), -torch.inf)
            chunk = torch.logsumexp(each, 0)  # [c, N] to [N]
            total = chunk if total is None else torch.logaddexp(total, chunk)
        assert total is not None
        return total

    def _log_probs(self, y: Tensor) -> Tensor:
        """log p(y) of each component: [S, N]."""
        if self.f_variance is None:
            return self.likelihood.log_prob(self.f, y, self.theta, 1)
        _, mean, std = self.normals()
        each = -0.5 * ((y - mean) / std).square() - std.log() - HALF_LOG_2PI
        return (each.flatten(2).sum(2) if each.ndim > 2 else each).to(self.f.dtype)

    def cdf(self, y: Tensor) -> Tensor:
        return self._average(lambda part: part._cdfs(y)).to(self.f.dtype)

    def _cdfs(self, y: Tensor) -> Tensor:
        """P(Y <= y) of each component: [S, N, *event]."""
        if self.f_variance is None:
            return self.likelihood.cdf(y, self.f, self.theta, 1)
        _, mean, std = self.normals()
        return standard_normal_cdf((y - mean) / std)

    def quantile(self, level: float) -> Tensor:
        parts = self._some_rows(4 * max(1, self.f[:, :1].numel()))
        return torch.cat([part._quantile_of_all(level) for part in parts]).to(self.f.dtype)

    def quantiles(self, levels: Tensor) -> Tensor:
        if not self.likelihood.is_normal:
            return super().quantiles(levels)
        parts = self._some_rows(4 * len(levels) * max(1, self.f[:, :1].numel()))
        return torch.cat([part._normal_quantiles(levels) for part in parts], 1).to(self.f.dtype)

    def _some_rows(self, numbers: int) -> Iterator[Mixture]:
        """The rows in blocks, in float64; `numbers` is the size of the work per row."""
        rows = max(1, CHUNK_ELEMENTS // numbers)
        for start in range(0, max(1, self.f.shape[1]), rows):
            yield self._rows(start, rows)._exact

    def _normal_quantiles(self, levels: Tensor) -> Tensor:
        """Quantiles of a mixture of normals, at all levels at once: [L, N, *event].

        They are computed in float64: a level of 1 − 10⁻⁸ is 1 in float32, with an infinite
        quantile.
        """
        weights, mean, std = (part.double() for part in self.normals())
        mean, std = mean.unsqueeze(1), std.unsqueeze(1)  # [S, 1, N, *event]
        levels = levels.to(mean).reshape(-1, *(1,) * (mean.ndim - 2))
        each = mean + std * torch.special.ndtri(levels)  # bounds of the mixture's quantile
        cdf = lambda y: mix(standard_normal_cdf((y - mean) / std), weights)  # noqa: E731
        return solve(cdf, levels, each.amin(0), each.amax(0))

    def _quantile_of_all(self, level: float) -> Tensor:
        if self.likelihood.is_normal:
            one = torch.tensor([level], dtype=torch.float64)
            return self._normal_quantiles(one)[0].to(self.f.dtype)
        centre = self.likelihood.mean(self.f, self.theta, 1)
        if self.likelihood.discrete:
            low, high = torch.full_like(centre[0], -1.0), centre.amax(0).floor() + 1.0
            low, high = widen(self.cdf, level, low, high, high.sqrt().ceil())
            return bisect_whole(self.cdf, level, low, high)
        width = self.likelihood.entropy(self.f, self.theta, 1).exp().amax(0)  # a scale of y
        low, high = centre.amin(0) - width, centre.amax(0) + width
        low, high = widen(self.cdf, level, low, high, width)
        return solve(self.cdf, level, low, high)

    def sample(self, n: int, seed: int) -> Tensor:
        source = generator(seed, "predictive", "sample")
        chosen = systematic(self.weights, n, source).to(self.f.device)
        f = self.f[chosen]
        if self.f_variance is not None:
            noise = torch.randn(f.shape, generator=source, dtype=f.dtype).to(f.device)
            f = torch.addcmul(f, self.f_variance[chosen].clamp_min(0.0).sqrt(), noise)
        theta = {name: value[chosen] for name, value in self.theta.items()}
        return self.likelihood.sample(f, theta, source, 1)

    def _average(self, quantity: Callable[[Mixture], Tensor]) -> Tensor:
        """The weighted mean of a quantity [S, ...] over the components, chunk by chunk."""
        total: Tensor | None = None
        for part in self.chunks():
            chunk = mix(quantity(part), part.weights)
            total = chunk if total is None else total + chunk
        assert total is not None
        return total

    def chunks(self) -> Iterator[Mixture]:
        """Blocks of components of limited size."""
        count = max(1, CHUNK_ELEMENTS // max(1, self.f[0].numel()))
        if count >= self.f.shape[0]:
            yield self
            return
        for start in range(0, self.f.shape[0], count):
            some = slice(start, start + count)
            theta = {name: value[some] for name, value in self.theta.items()}
            variance = None if self.f_variance is None else self.f_variance[some]
            yield Mixture(self.likelihood, self.f[some], theta, self.weights[some], variance)

    def _rows(self, start: int, count: int) -> Mixture:
        some = slice(start, start + count)
        variance = None if self.f_variance is None else self.f_variance[:, some]
        return Mixture(self.likelihood, self.f[:, some], self.theta, self.weights, variance)
