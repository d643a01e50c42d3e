"""Recalibrated predictives: class probabilities, conformal intervals and sets, rescaled, warped.

`CalibratedClasses`: recalibrated class probabilities. A recalibration acts on log p̄, the logarithm
of the *averaged* probabilities, because these are scored. It changes the total uncertainty; the
proportion of epistemic uncertainty stays that of the base (`predictive/classes.py`).

`ConformalInterval`, `ConformalSet`: an interval, or a set of classes, with guaranteed coverage.
Conformal prediction does not change the distribution of y. It gives the size of an interval or set
that holds y at the calibrated level, so there is only one level. Everything else is from the base.

`Rescaled`: a predictive that is scaled about its mean.

    y' = m + s (y - m):    p'(y) = p(m + (y - m) / s) / s,    Var' = s² Var

The mean stays, standard deviations are multiplied by s, and the shape is kept.

`Warped`: the distribution function F becomes R(F), with R increasing from 0 to 1.

    cdf'(y) = R(F(y)),    quantile'(q) = F⁻¹(R⁻¹(q)),    p'(y) = p(y) R'(F(y))

R is piecewise linear with positive slopes, so that all three exist. Moments and draws use a table
of the base's quantiles Q(t) = F⁻¹(Φ(t)) at even steps of t, with linear interpolation (which is
exact for a normal). A draw is Q(Φ⁻¹(R⁻¹(q))) for uniform q. A moment is the sum over cells, which
are cut at the points of R, of

    R' ∫ (a + bt)ᵏ φ(t) dt

in closed form. The variance is split into aleatoric and epistemic in the proportions of the base.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from doxa.errors import DataError, Unavailable
from doxa.likelihoods.gaussian import standard_normal_cdf
from doxa.noise import generator
from doxa.predictive.blend import Blend
from doxa.predictive.classes import ClassTable
from doxa.predictive.form import Derived, Form, KeepsDraws
from doxa.predictive.mixture import Mixture


class Conformal(KeepsDraws):
    """A form whose interval or set was calibrated at one level."""

    def __init__(self, base: Form, level: float) -> None:
        super().__init__(base)
        self.level = level

    @property
    def guaranteed_level(self) -> float:
        return self.level

    @property
    def mean(self) -> Tensor:
        return self.base.mean

    @property
    def aleatoric(self) -> Tensor:
        return self.base.aleatoric

    @property
    def epistemic(self) -> Tensor:
        return self.base.epistemic

    @property
    def variance(self) -> Tensor:
        return self.base.variance

    @property
    def std(self) -> Tensor:
        return self.base.std

    @property
    def expected_entropy(self) -> Tensor:
        return self.base.expected_entropy

    @property
    def marginal_entropy(self) -> Tensor:
        return self.base.marginal_entropy

    @property
    def mutual_information(self) -> Tensor:
        return self.base.mutual_information

    def class_table(self) -> Tensor:
        return self.base.class_table()

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.base.normals()

    def log_prob(self, y: Tensor) -> Tensor:
        return self.base.log_prob(y)

    def cdf(self, y: Tensor) -> Tensor:
        return self.base.cdf(y)

    def quantile(self, level: float) -> Tensor:
        return self.base.quantile(level)

    def sample(self, n: int, seed: int) -> Tensor:
        return self.base.sample(n, seed)

    def check_level(self, level: float | None) -> None:
        if level is not None and abs(level - self.level) > 1e-9:
            raise Unavailable(
                f"this predictive was calibrated for level {self.level:g}, not for "
                f"{level:g}: call it without a level, or calibrate for that level"
            )


class ConformalInterval(Conformal):
    """`bounds` returns (low, high) [N, *event]; it is called at first use."""

    def __init__(
        self, base: Form, level: float, bounds: Callable[[], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(base, level)
        self._compute = bounds

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        low, high = self._compute()
        if bool((torch.isnan(low) | torch.isnan(high)).any()):
            raise DataError("the predictions are NaN: there is no interval")
        return low, high

    def interval(self, level: float | None) -> tuple[Tensor, Tensor]:
        self.check_level(level)
        return self._bounds


class ConformalSet(Conformal):
    """`chosen` returns the classes, bool [N, C]; it is called at first use."""

    def __init__(self, base: Form, level: float, chosen: Callable[[], Tensor]) -> None:
        super().__init__(base, level)
        self._compute = chosen

    @cached_property
    def _chosen(self) -> Tensor:
        return self._compute()

    def prediction_set(self, level: float | None) -> Tensor:
        self.check_level(level)
        return self._chosen


class CalibratedClasses(ClassTable):
    """A table computed from the average of the base. It has no draws."""

    def votes(self) -> Tensor:
        raise self.unavailable("votes")

    def sample(self, n: int, seed: int) -> Tensor:
        return self.labels(self.log_table, n, generator(seed, "predictive", "sample"))

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super().unavailable(
            quantity,
            instead
            or "recalibration acts on the averaged probabilities; the draws are those of "
            "the posterior's base: posterior.base.predict(x)",
        )


def log_probs(form: Form) -> Tensor:
    """log p̄ of the averaged probabilities, [N, C, *site], in float64.

    It is computed from logits where the form has them, so that 1e-5000 still has a logarithm. A
    probability of exactly 0 is replaced by the smallest normal number of its type, so that all
    values are finite for finite predictions.
    """
    table = _log_probs(form)
    smallest = math.log(torch.finfo(form.mean.dtype).tiny)
    return torch.where(table == -torch.inf, smallest, table)


def _log_probs(form: Form) -> Tensor:
    if isinstance(form, ClassTable):
        return form.log_table
    if isinstance(form, Conformal):
        return _log_probs(form.base)
    if isinstance(form, Blend):
        each = torch.stack([_log_probs(part) for part in form.parts])
        return _average(each, form.part_weights)
    if isinstance(form, Mixture):
        chunks = [_average(_log_tables(part), part.weights) for part in form.chunks()]
        return torch.logsumexp(torch.stack(chunks), 0)
    return form.class_table().log()


def _log_tables(form: Mixture) -> Tensor:
    """log p of each draw: [S, N, C, *site]."""
    f = form.f.double()
    if form.likelihood.binary:
        return torch.stack([logsigmoid(-f), logsigmoid(f)], 2)
    return torch.log_softmax(f, 2)


def _average(each: Tensor, weights: Tensor) -> Tensor:
    """log of the weighted sum over the first axis, which may be a chunk of all draws."""
    weights = weights.double().reshape(-1, *[1] * (each.ndim - 1))
    # Entries of weight zero may be undefined.
    return torch.logsumexp(torch.where(weights > 0, each + weights.log(), -torch.inf), 0)


class Rescaled(KeepsDraws):
    """A form of continuous y and its factor s, [*event] or a number."""

    def __init__(self, base: Form, factor: Tensor) -> None:
        super().__init__(base)
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

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        weights, means, stds = self.base.normals()
        return weights, self.mean + self.factor * (means - self.mean), self.factor * stds

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
        """The point of the base that corresponds to y."""
        return self.mean + (y - self.mean) / self.factor


_NODES, _REACH = 161, 8.0  # of the table of quantiles, in standard normals


class PiecewiseLinear:
    """E increasing functions through the points (x[e, k], y[e, k])."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.contiguous(), y.contiguous()

    def __call__(self, values: Tensor) -> Tensor:
        """[N, E] to [N, E]."""
        return _interpolate(self.x, self.y, values)

    def inverse(self, values: Tensor) -> Tensor:
        return _interpolate(self.y, self.x, values)

    def slope(self, values: Tensor) -> Tensor:
        k = _piece(self.x, values)
        rise = self.y.gather(1, k) - self.y.gather(1, k - 1)
        return (rise / (self.x.gather(1, k) - self.x.gather(1, k - 1))).t()


def _nodes() -> Tensor:
    return torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64)


def _along(table: Tensor, t: Tensor) -> Tensor:
    """Linear interpolation in a table [nodes, ...] at even steps: at t [C], shared by all entries,
    or at t [C, ...], one for each entry."""
    place = (t.clamp(-_REACH, _REACH) + _REACH) * ((_NODES - 1) / (2.0 * _REACH))
    left = place.floor().clamp(max=_NODES - 2).long()
    if t.ndim == 1:
        return torch.lerp(table[left], table[left + 1], (place - left)[:, None])
    return torch.lerp(table.gather(0, left), table.gather(0, left + 1), place - left)


def _piece(x: Tensor, values: Tensor) -> Tensor:
    """[E, N]: the number of the point right of each value."""
    place = torch.searchsorted(x, values.t().contiguous(), right=True)
    return place.clamp(1, x.shape[1] - 1)


def _interpolate(x: Tensor, y: Tensor, values: Tensor) -> Tensor:
    k = _piece(x, values)
    (x0, x1), (y0, y1) = ((each.gather(1, k - 1), each.gather(1, k)) for each in (x, y))
    return (y0 + (values.t() - x0) / (x1 - x0) * (y1 - y0)).clamp(0.0, 1.0).t()


class Warped(Derived):
    """A form of continuous y, and R for each output."""

    def __init__(self, base: Form, curve: PiecewiseLinear) -> None:
        super().__init__(base)
        self.curve = curve

    @property
    def mean(self) -> Tensor:
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        return self._moments[1]

    @property
    def epistemic(self) -> Tensor:
        share = self.base.epistemic / self.base.variance
        return self.variance * torch.where(self.base.variance > 0, share, 0.0)

    @property
    def aleatoric(self) -> Tensor:
        return self.variance - self.epistemic

    @cached_property
    def _table(self) -> Tensor:
        """[nodes, N, *event] float64: the base's quantiles at even steps of a standard normal."""
        return self.base.quantiles(standard_normal_cdf(_nodes())).double()

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        like = self.base.mean
        table = self._table.reshape(_NODES, len(like), -1)  # [nodes, N, E]
        each = [self._moments_of(e, table[..., e]) for e in range(table.shape[2])]
        mean, variance = (torch.stack([m[i] for m in each], 1).reshape(like.shape) for i in (0, 1))
        return mean.to(like), variance.to(like)

    def _moments_of(self, e: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of one output, [N], from its table [nodes, N]."""
        knots = torch.special.ndtri(self.curve.x[e])
        cuts = torch.cat([_nodes().to(knots), knots[knots.abs() < _REACH]]).unique()
        value = _along(table, cuts)  # [C, N]
        b = value.diff(dim=0) / cuts.diff()[:, None]
        a = value[:-1] - b * cuts[:-1, None]
        a, b = (
            torch.cat([v[:1], v, v[-1:]]) for v in (a, b)
        )  # the outermost cells extend to infinity
        ends = torch.cat([cuts.new_tensor([-math.inf]), cuts, cuts.new_tensor([math.inf])])
        below = standard_normal_cdf(ends)
        density = (-0.5 * ends.square()).exp() / math.sqrt(2 * math.pi)
        zeroth = below.diff()
        zeroth[-1] = below[1]  # the tails are equal, and 1 − Φ loses precision
        first = -density.diff()
        second = zeroth - (torch.where(ends.isfinite(), ends, 0.0) * density).diff()
        rise = _interpolate(self.curve.x[e : e + 1], self.curve.y[e : e + 1], below[:, None])
        slope = rise.squeeze(1).diff() / zeroth
        zeroth, first, second = ((slope * m)[:, None] for m in (zeroth, first, second))
        mean = (a * zeroth + b * first).sum(0)
        away = a - mean
        return mean, (away.square() * zeroth + 2 * away * b * first + b.square() * second).sum(0)

    def log_prob(self, y: Tensor) -> Tensor:
        if math.prod(y.shape[1:]) != 1:
            raise self.unavailable(
                "log_prob", "each output was recalibrated separately: there is no joint density"
            )
        slope = self.curve.slope(self._base_cdf(y)).squeeze(1)
        return self.base.log_prob(y) + slope.log().to(self.base.mean.dtype)

    def cdf(self, y: Tensor) -> Tensor:
        return self.curve(self._base_cdf(y)).reshape(y.shape).to(self.base.mean.dtype)

    def quantile(self, level: float) -> Tensor:
        outputs = self.curve.x.shape[0]
        levels = self.curve.inverse(self.curve.x.new_full((1, outputs), level))[0].tolist()
        if outputs == 1:
            return self.base.quantile(levels[0])
        each = [self.base.quantile(own).flatten(1)[:, e] for e, own in enumerate(levels)]
        return torch.stack(each, 1).reshape(self.base.mean.shape)

    def sample(self, n: int, seed: int) -> Tensor:
        """Draws of each row independently."""
        like = self.base.mean
        source = generator(seed, "predictive", "sample")
        normal = torch.randn((n, *like.shape), generator=source, dtype=torch.float64)
        q = standard_normal_cdf(normal).to(like.device).reshape(-1, self.curve.x.shape[0])
        u = self.curve.inverse(q).reshape(normal.shape)
        return _along(self._table, torch.special.ndtri(u)).to(like.dtype)

    def _base_cdf(self, y: Tensor) -> Tensor:
        """[N, E] in float64."""
        return self.base.cdf(y).double().reshape(len(y), math.prod(y.shape[1:]))

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super().unavailable(
            quantity,
            instead
            or "its quantiles were recalibrated; the draws are those of the posterior's "
            "base: posterior.base.predict(x)",
        )
