"""Priors and posteriors of θ: a sampler, a torch distribution, weighted atoms, or a quadrature.

    w_s ∝ w_s p(y | θ_s, d)

is Bayes' rule on atoms: exact for a discrete θ, importance sampling on draws of the prior. The
density of one number has quadrature nodes where its mass is (`Quadrature`). They are placed again
after an outcome: fixed nodes cannot represent a posterior that is narrower than their distance.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributions as D

from doxa.decide.design.draws import draw, outcomes_of, unchecked, uniform
from doxa.errors import DataError, MethodError, NumericalError, Unavailable

Sampler = Callable[[int, torch.Generator], Tensor]
Density = Callable[[Tensor], Tensor]
Panels = tuple[Tensor, Tensor, Tensor]  # left and right ends [P], log density by v [P, 15]
log = logging.getLogger("doxa")

# Gauss's rule with 7 nodes and Kronrod's with 15, which contains it, on [−1, 1]: from the outermost
# node to the centre (QUADPACK, Piessens et al., 1983).
_NODES = (
    0.9914553711208126392, 0.9491079123427585245, 0.8648644233597690728, 0.7415311855993944399,
    0.5860872354676911303, 0.4058451513773971669, 0.2077849550078984676, 0.0,
)  # fmt: skip
_KRONROD = (
    0.0229353220105292250, 0.0630920926299785533, 0.1047900103222501838, 0.1406532597155259187,
    0.1690047266392679028, 0.1903505780647854099, 0.2044329400752988924, 0.2094821410847278280,
)  # fmt: skip
_GAUSS = (
    0.0, 0.1294849661688696933, 0.0, 0.2797053914892766679, 0.0, 0.3818300505051189450, 0.0,
    0.4179591836734693878,
)  # fmt: skip
_CENTRAL, _OUTER = 6.0, (8.0, 12.0, 20.0, 40.0, 80.0, 150.0)  # initial panels, in v
_MOST_PANELS = 2000
_NEGLIGIBLE = 30.0  # nats below the maximum: 1e-13 of its density
_DEPTHS = (30.0, 2e3, 1e5, 1e7)  # distances below the prior's maximum up to which θ is searched


class ParameterDistribution(ABC):
    """A prior or posterior of θ. All kinds have `draw`; some have `log_prob` and `atoms`. `dtype`
    is that of θ, or None if it is not known."""

    dtype: torch.dtype | None = None

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """[n, *shape of θ]"""

    def log_prob(self, theta: Tensor) -> Tensor:
        """[...] of [..., *shape of θ]"""
        raise Unavailable(
            "the density of the prior is not known: pass a torch distribution, or log_prob= with "
            "the sampler"
        )

    def atoms(self, like: Tensor, nodes: int = 200) -> Weighted:
        """θ as finitely many values with weights: all values, or the nodes of a quadrature."""
        raise Unavailable(
            "θ has no quadrature: the prior must be a list of atoms, discrete, or a distribution "
            "of one number with an inverse distribution function; estimate by draws instead"
        )


class Sampled(ParameterDistribution):
    """A sampler (n, generator) -> θ [n, ...], with its log density where that is known."""

    def __init__(self, sampler: Sampler, log_prob: Callable[[Tensor], Tensor] | None) -> None:
        self.sampler, self.density = sampler, log_prob

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        theta = self.sampler(n, generator)
        if not isinstance(theta, Tensor) or not theta.ndim or len(theta) != n:
            shape = list(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
            raise DataError(
                f"the sampler of the prior must return {n} draws [{n}, ...], not {shape}"
            )
        return theta.to(like) if theta.is_floating_point() else theta.to(like.device)

    def log_prob(self, theta: Tensor) -> Tensor:
        return super().log_prob(theta) if self.density is None else self.density(theta)


class Distributed(ParameterDistribution):
    """A torch distribution; all of its axes are those of one θ."""

    def __init__(self, distribution: D.Distribution) -> None:
        self.distribution = unchecked(distribution)
        own: Any = distribution
        while hasattr(own, "base_dist"):
            own = own.base_dist
        found = (getattr(own, name, None) for name in own.arg_constraints)
        types = (v.dtype for v in found if isinstance(v, Tensor) and v.is_floating_point())
        self.dtype = next(types, None)

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
        try:
            line = Line.of(own, like)
        except NotImplementedError:
            return super().atoms(like, nodes)
        return Quadrature(line, self.log_prob, None, like, nodes)


class Weighted(ParameterDistribution):
    """Atoms θ [S, ...] with log weights [S], which need not be normalised."""

    def __init__(self, theta: Tensor, log_weight: Tensor | None = None) -> None:
        self.theta = theta
        self.dtype = theta.dtype if theta.is_floating_point() else None
        start = theta.new_zeros(len(theta)) if log_weight is None else log_weight
        self.log_weight = start - start.logsumexp(0)

    @property
    def weight(self) -> Tensor:
        return self.log_weight.exp()

    @property
    def effective(self) -> float:
        """The effective number of atoms, 1 / Σ w²."""
        return float(1 / self.weight.square().sum())

    @property
    def mean(self) -> Tensor:
        return torch.tensordot(self.weight, self.theta, 1)

    @property
    def std(self) -> Tensor:
        away = (self.theta - self.mean).square()
        return torch.tensordot(self.weight, away, 1).sqrt()

    def updated(self, log_likelihood: Tensor) -> Weighted:
        """The posterior after an outcome whose log likelihood is [S]."""
        new = self.log_weight + log_likelihood.to(self.log_weight)
        if not bool(torch.isfinite(new.max())):
            raise DataError(
                "the outcome is impossible: it has probability 0 under every θ of the prior"
            )
        return Weighted(self.theta, new)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        index = torch.multinomial(self.weight, n, replacement=True, generator=generator)
        return self.theta[index].to(like)

    def atoms(self, like: Tensor, nodes: int = 200) -> Weighted:
        return Weighted(self.theta.to(like), self.log_weight.to(like))


class Line:
    """θ = g(v): the support of a density of one number, mapped from the real line.

        c + s sinh(v),   low + s exp(v),   high − s exp(−v),   low + (high − low)/(1 + exp(−v))

    for a support without ends, with one or with two. A density that is singular at an end, or falls
    like a power of θ, falls exponentially in v.
    """

    def __init__(self, low: float, high: float, centre: float, scale: float) -> None:
        far = 1e12 * scale  # the inverse of a distribution function may round −∞ to a number
        self.ends = (low > centre - far, high < centre + far)
        if self.ends == (True, False):
            scale = centre - low
        elif self.ends == (False, True):
            scale = high - centre
        self.low, self.high, self.centre, self.scale = low, high, centre, scale

    @classmethod
    def of(cls, own: D.Distribution, like: Tensor) -> Line:
        """The ends, the median and the quartiles of a distribution."""
        u = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64, device=like.device)
        low, first, centre, third, high = own.icdf(u).double().tolist()
        low, high = (-torch.inf if low != low else low), (torch.inf if high != high else high)
        scale = (third - first) / 1.349  # a normal's std
        least = 4 * torch.finfo(like.dtype).eps * abs(centre)
        if not least < scale < 1e150:
            kind = str(like.dtype).removeprefix("torch.")
            raise NumericalError(
                f"a prior of width {scale:g} at {centre:g} cannot be represented in {kind}: give θ "
                "in units in which its width is moderate"
            )
        return cls(low, high, centre, scale)

    def theta(self, v: Tensor) -> Tensor:
        if self.ends == (True, True):
            low = self.low + (self.high - self.low) * v.sigmoid()
            return torch.where(v < 0, low, self.high - (self.high - self.low) * (-v).sigmoid())
        if self.ends[0]:
            return self.low + self.scale * v.exp()
        if self.ends[1]:
            return self.high - self.scale * (-v).exp()
        return self.centre + self.scale * v.sinh()

    def log_slope(self, v: Tensor) -> Tensor:
        """log dθ/dv"""
        if self.ends == (True, True):
            inside = F.logsigmoid(v) + F.logsigmoid(-v)
            return inside + torch.tensor(self.high - self.low, dtype=v.dtype).log()
        scale = torch.tensor(self.scale, dtype=v.dtype).log()
        if self.ends[0] or self.ends[1]:
            return scale + (v if self.ends[0] else -v)
        return scale + v.cosh().log()


class Quadrature(Weighted):
    """A density of one number on nodes that are placed where its mass is.

    The line is cut into panels with 15 nodes each. A panel is halved while the rule of Gauss, which
    uses 7 of the nodes, and that of Kronrod, which uses all, differ in the mass, the mean or the
    variance; while the panels on both sides of a boundary extrapolate to different values there; or
    while the log density changes so much between two nodes that a maximum may lie between them. The
    stated errors are these differences, so they are those of the coarser rule.

    Parameters
    ----------
    line: the support. prior: a log density of θ [S]. likelihood: a log density of what was seen,
        given θ [S], or None. like: has the type and device of θ. nodes: about how many there are
        at the beginning. peak: the maximum of the prior by v, where there is a likelihood: that is
        evaluated only where the prior is not too far below it. panels: where they are known.
    """

    def __init__(
        self, line: Line, prior: Density, likelihood: Density | None, like: Tensor,
        nodes: int = 200, peak: float = 0.0, panels: Panels | None = None,
    ) -> None:  # fmt: skip
        self.line, self.prior, self.likelihood, self.peak = line, prior, likelihood, peak
        self.like = like.detach().new_empty(0)
        double = like.dtype == torch.float64
        self._tolerance, self._finest = (1e-10, 1e-14) if double else (1e-4, 1e-6)
        new = {"dtype": torch.float64, "device": like.device}
        knots, kronrod, gauss = (
            torch.tensor([*half, *(sign * x for x in half[-2::-1])], **new)  # type: ignore[arg-type]
            for half, sign in ((_NODES, -1), (_KRONROD, 1), (_GAUSS, 1))
        )
        self._knots, self._kronrod, self._gauss = -knots, kronrod, gauss
        self._ends = _extrapolation(self._knots)
        self.panels = self._placed(nodes) if panels is None else panels
        left, right, value = self.panels
        log_mass = value + ((right - left) / 2).log().unsqueeze(1) + self._kronrod.log()
        self.log_total = log_mass.logsumexp((0, 1))  # of the density: for example log p(outcomes)
        log_mass = log_mass - self.log_total
        kept = log_mass > (-34 if double else -20)
        self._panel = kept.nonzero()[:, 0]  # of each node that is kept, [S]
        self._coarse = (self._gauss / self._kronrod).expand_as(kept)[kept]
        self._v, self._height = self._at(left, right)[kept], value[kept]
        super().__init__(self.line.theta(self._v).to(like), log_mass[kept].to(like))

    def _at(self, left: Tensor, right: Tensor) -> Tensor:
        """The nodes of panels, in v: [P, 15]."""
        half = ((right - left) / 2).unsqueeze(1)
        return ((right + left) / 2).unsqueeze(1) + half * self._knots

    def log_density(self, theta: Tensor, above: Tensor | None = None) -> Tensor:
        """The unnormalised log density of θ [S]. With `above`, it is evaluated only there, and is
        −∞ elsewhere."""
        before = self.prior(theta).double()
        before = torch.where(torch.isnan(before), -torch.inf, before)
        if self.likelihood is None:
            return before
        inside = before > -torch.inf
        inside = inside if above is None else inside & above
        safe = torch.where(inside, theta, theta.new_tensor(self.line.centre))
        after = self.likelihood(safe.to(self.like)).double()
        return torch.where(inside, before + after, -torch.inf)

    @torch.no_grad()
    def _value(self, left: Tensor, right: Tensor, depth: float) -> Tensor:
        """The log density by v, not normalised [P, 15]."""
        v = self._at(left, right).flatten()
        theta, slope = self.line.theta(v), self.line.log_slope(v)
        if self.likelihood is None:
            return (self.log_density(theta) + slope).reshape(-1, 15)
        before = self.prior(theta).double() + slope
        value = self.log_density(theta, before > self.peak - depth)
        bad = torch.isnan(value) | (value == torch.inf)
        if bool((bad & (before > self.peak - 700)).any()):
            row = int(bad.nonzero()[0])
            raise NumericalError(
                f"the likelihood of the outcomes is {float(value[row])} at θ = "
                f"{float(theta[row]):g}: it must be a finite density for every θ of the prior"
            )
        return torch.where(bad, -torch.inf, value + slope).reshape(-1, 15)

    def _placed(self, nodes: int) -> Panels:
        for depth in _DEPTHS:
            panels = self._searched(nodes, depth)
            if self.likelihood is None or not self._cut(panels, depth):
                break
        if not bool(torch.isfinite(panels[2].max())):
            raise DataError(
                "the outcome is impossible: it has probability 0 under every θ of the prior"
            )
        if panels[2].max() < -1e11:
            raise NumericalError(
                f"the log density of the outcomes is {float(panels[2].max()):.1e} at the best θ: "
                "they lie too far from what the prior and the likelihood expect; check their units"
            )
        if len(panels[0]) > _MOST_PANELS:
            log.warning(
                "the posterior is not resolved by %d nodes: see mean_error and std_error",
                panels[2].numel(),
            )
        return panels

    def _searched(self, nodes: int, depth: float) -> Panels:
        outer = torch.tensor(_OUTER, dtype=torch.float64, device=self.like.device)
        count = max(4, nodes // 15)
        centre = torch.linspace(-_CENTRAL, _CENTRAL, count + 1, device=outer.device).to(outer)
        edges = torch.cat([-outer.flip(0), centre, outer])
        left, right = edges[:-1], edges[1:]
        panels, errors = (left, right, self._value(left, right, depth)), list[float]()
        while len(panels[0]) <= _MOST_PANELS:
            split = self._unresolved(*panels, errors)
            if not bool(split.any()):
                break
            panels = self._halved(panels, split, depth)
        return panels

    def _coarse_panels(self, error: Tensor, errors: list[float]) -> Tensor:
        """The panels whose errors [P] matter, relative to a total of 1. There are none if the sum
        of errors is small enough, or if it is small and has not fallen for three rounds, since it
        is then rounding."""
        errors.append(float(error.sum()))
        stalled = len(errors) > 3 and errors[-1] > 0.5 * errors[-4]
        done = errors[-1] <= (1e4 if stalled else 1) * self._tolerance
        return (error > self._tolerance / len(error)) & (not done)

    def _cut(self, panels: Panels, depth: float) -> bool:
        """Whether the posterior has mass where the prior was considered negligible."""
        v, value = self._at(*panels[:2]).flatten(), panels[2].flatten()
        top, nothing = value.max(), value == -torch.inf
        if top > -torch.inf:  # next to a node of sufficient density
            near = value > top - 25
            nothing &= F.pad(near[1:], (0, 1)) | F.pad(near[:-1], (1, 0))
        v = v[nothing]
        if not len(v):
            return False
        before = self.prior(self.line.theta(v)).double() + self.line.log_slope(v)
        return bool((before <= self.peak - depth).logical_and(before > -torch.inf).any())

    def _halved(self, panels: Panels, split: Tensor, depth: float = _DEPTHS[-1]) -> Panels:
        left, right, value = panels
        a, b = left[split], right[split]
        middle = (a + b) / 2
        new = torch.cat([a, middle]), torch.cat([middle, b])
        left, right = torch.cat([left[~split], new[0]]), torch.cat([right[~split], new[1]])
        value = torch.cat([value[~split], self._value(*new, depth)])
        order = left.argsort()
        return left[order], right[order], value[order]

    def _errors(self, density: Tensor, half: Tensor) -> Tensor:
        """The error of each panel's integral, from densities by v [..., P, 15]: [P], the largest
        over the leading axes."""
        off = (density @ (self._kronrod - self._gauss)).abs() * half
        ends = density @ self._ends  # [..., P, 2], extrapolated to the panel's ends
        gap = (1 - self._knots[-1]) * (ends[..., 1:, 0] - ends[..., :-1, 1]).abs()
        off = off + F.pad(gap, (0, 1)) * half + F.pad(gap, (1, 0)) * half
        return off.reshape(-1, len(half)).amax(0)

    def _wide(self, left: Tensor, right: Tensor) -> Tensor:
        """The panels that contain more than a few numbers of θ's type."""
        a, b = self.line.theta(left), self.line.theta(right)
        return b - a > self._finest * torch.maximum(a.abs(), b.abs())

    def _unresolved(
        self, left: Tensor, right: Tensor, value: Tensor, errors: list[float]
    ) -> Tensor:
        """The panels that are to be halved [P]."""
        half, top = (right - left) / 2, value.max()
        if top == -torch.inf:  # nothing found yet: look everywhere
            return left.abs() < _CENTRAL
        density = (value - top).exp()
        integral = lambda f: (f @ self._kronrod) @ half  # noqa: E731
        theta, total = self.line.theta(self._at(left, right)), integral(density)
        mean = integral(density * theta) / total
        std = (integral(density * (theta - mean).square()) / total).sqrt()
        z = torch.where(density > 0, (theta - mean) / std, 0.0)
        error = self._errors(torch.stack([density, density * z, density * z.square()]), half)
        coarse = self._coarse_panels(error / total, errors)
        step = torch.nan_to_num(value.diff(dim=1).abs(), nan=0.0, posinf=0.0)
        change = torch.maximum(F.pad(step, (1, 0)), F.pad(step, (0, 1)))  # to either neighbour
        hidden = (value + change > top - _NEGLIGIBLE) & (change > 4.0)
        return self._wide(left, right) & (coarse | hidden.any(1))

    def given(self, likelihood: Density) -> Quadrature:
        """The posterior after outcomes whose log likelihood is a function of θ [S], with its own
        nodes."""
        peak = float(self.panels[2].max())
        return Quadrature(self.line, self.log_density, likelihood, self.like, peak=peak)

    def refined(self, functions: Density) -> Quadrature:
        """The same with nodes that also integrate functions of θ [S], given as [..., S]."""
        panels, errors = self.panels, list[float]()
        while len(panels[0]) <= _MOST_PANELS:
            left, right, value = panels
            mass = (value - self.log_total).exp()
            theta = self.line.theta(self._at(left, right))
            theta = torch.where(mass > 1e-15, theta, self.theta[self.log_weight.argmax()].double())
            found = functions(theta.flatten().to(self.like)).double().unflatten(-1, mass.shape)
            error = self._errors(found * mass, (right - left) / 2)
            split = self._wide(left, right) & self._coarse_panels(error, errors)
            if not bool(split.any()):
                break
            panels = self._halved(panels, split)
        return self._with(panels)

    def finer(self, log_weight: Tensor) -> Quadrature | None:
        """The same with more nodes, if some of the posteriors [N, S] on its nodes need them: if the
        masses of a panel by the two rules differ by more than 1e-6. None if no panel does."""
        part = log_weight.double().exp() * (1 - self._coarse)
        off = part.new_zeros(len(part), len(self.panels[0])).index_add(1, self._panel, part)
        split = self._wide(*self.panels[:2]) & (off.abs().amax(0) > 1e-6)
        if not bool(split.any()) or len(split) > _MOST_PANELS:
            return None
        return self._with(self._halved(self.panels, split))

    def _with(self, panels: Panels) -> Quadrature:
        return Quadrature(
            self.line, self.prior, self.likelihood, self.like, peak=self.peak, panels=panels
        )

    def error(self, values: Tensor) -> Tensor:
        """The error of the mean of values [S, ...].

        It is the sum of the differences to the coarser rule over the panels, of the contributions
        of the four outermost nodes on either side, beyond which there are no nodes, and of rounded
        and neglected parts.
        """
        weight = self.weight.reshape(-1, *(1,) * (values.ndim - 1)).to(values)
        part = weight * values
        less = 1 - self._coarse.reshape(weight.shape).to(values)
        off = values.new_zeros(len(self.panels[0]), *values.shape[1:])
        off = off.index_add(0, self._panel, part * less).abs().sum(0)
        ends = part[:4].abs().sum(0) + part[-4:].abs().sum(0)
        return off + ends + self._finest * 100 * part.abs().sum(0)

    @property
    def mean_error(self) -> Tensor:
        """The estimated error of `mean`."""
        rounding = 4 * torch.finfo(self.like.dtype).eps * self.mean.abs()
        return self.error(self.theta - self.mean) + rounding

    @property
    def std_error(self) -> Tensor:
        """The estimated error of `std`."""
        std = self.std
        return self.error((self.theta - self.mean).square() - std.square()) / (2 * std)

    def log_prob(self, theta: Tensor) -> Tensor:
        found = self.log_density(theta.double().flatten()) - self.log_total
        return found.reshape(theta.shape).to(theta)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """By the inverse of the distribution function; the density by v is linear between nodes."""
        v, height = self._v, (self._height - self._height.max()).exp()
        mass = (height[1:] + height[:-1]) / 2 * v.diff()
        cumulative = mass.cumsum(0)
        u = uniform((n,), v, generator) * cumulative[-1]
        cell = torch.searchsorted(cumulative, u).clamp_max(len(mass) - 1)
        share = ((u - cumulative[cell] + mass[cell]) / mass[cell]).clamp(0, 1)
        a, b = height[cell], height[cell + 1]
        # a t + (b − a) t²/2 = share (a + b)/2
        t = share * (a + b) / (a + (a.square() + share * (b.square() - a.square())).sqrt())
        return self.line.theta(v[cell] + t * (v[cell + 1] - v[cell])).to(like)

    def atoms(self, like: Tensor, nodes: int = 200) -> Weighted:
        if like.dtype == self.like.dtype and like.device == self.like.device:
            return self
        return Quadrature(self.line, self.prior, self.likelihood, like, nodes, self.peak)


def _extrapolation(knots: Tensor) -> Tensor:
    """Factors of values at the knots [n], for the polynomial through them at −1 and 1: [n, 2]."""
    away = knots.unsqueeze(1) - knots
    away.fill_diagonal_(1.0)
    ends = torch.stack([-1 - knots, 1 - knots])  # [2, n]
    return (ends.prod(1, keepdim=True) / (ends * away.prod(1))).T


def as_distribution(
    prior: Any, log_prob: Callable[[Tensor], Tensor] | None = None
) -> ParameterDistribution:
    if isinstance(prior, ParameterDistribution):
        return prior
    if isinstance(prior, D.Distribution):
        return Distributed(prior)
    if isinstance(prior, Tensor):  # draws from a posterior
        return Weighted(prior)
    if callable(prior):
        return Sampled(prior, log_prob)
    raise MethodError(
        "prior must be a torch distribution, a function (n, generator) -> draws, a tensor of draws "
        f"or a ParameterDistribution, not {prior!r}"
    )
