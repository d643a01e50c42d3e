"""Likelihoods that wrap others: in other units (`Affine`), with a noise level for each row
(`ScaledNoise`), or for several outputs (`Heads`).

If z = (y - loc) / scale has density p(z | f), then log p(y | f) = log p(z | f) - sum log scale.

**Noise that varies with x.** Held-out rows show whether the size of the errors depends on the
prediction m(x) or on the inputs. `calibrate_noise_scale` tests it, and fits a factor on the noise,

    log s(x) = a + Σ_k b_k u_k + c_k u_k²,     y = f(x) + s(x) σ e

where u_k in [-1, 1] is the rank of the k-th quantity (the prediction, an input) among the held-out
rows. Ranks are bounded: far from the data, s(x) stays within what was seen.

*Test.* The z-scores |z_i| of the errors become the scores of Klotz (1962),
Φ⁻¹((1 + r_i/(n + 1))/2)² at the rank r_i. The statistic is the largest absolute correlation of the
scores with one of the u_k and u_k². Its distribution under errors that do not depend on x comes
from permutations of the scores, so that the size of the test is exact for any distribution of the
errors. (Where the p-value by a normal approximation is above 0.3 or below 1e-6, it is taken.)

*Fit.* The penalised maximum likelihood under b_k, c_k ~ N(0, τ²) (per standard deviation of u_k and
u_k²), by Fisher scoring. τ is the one with the best score in cross-validation on these rows. The
family and the level of the noise are then calibrated with the factors of cross-validation, in which
no row has a part: with its own factor a large error would look small. The factor is used if it
scores better than noise that does not depend on x, by one standard error of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from doxa.errors import DataError, ModelError, ShapeError
from doxa.likelihoods.base import (
    CalibratedLikelihood,
    Likelihood,
    Shape,
    Theta,
    diagonal,
    log_mean_prob,
    map_estimate,
    per_row,
    significant_gain,
    sum_event,
)
from doxa.likelihoods.gaussian import StudentT
from doxa.noise import generator


@dataclass(frozen=True, eq=False)
class Affine(Likelihood):
    """The likelihood of y in its original units, when `base` was fitted to (y - loc) / scale.

    f and theta stay in fitted units; everything about y is in units of y. loc and scale are
    numbers, one per output [*event], or one set per run [runs, *event] (lead = 1).
    """

    name: ClassVar[str] = "affine"

    base: Likelihood
    loc: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        if not self.base.scales_targets:
            raise ModelError(f"targets of a {self.base.name} likelihood cannot be standardised")
        for field in ("loc", "scale"):
            value = getattr(self, field)
            if not isinstance(value, Tensor):
                object.__setattr__(self, field, torch.as_tensor(value, dtype=torch.float64))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Affine)
            and self.base == other.base
            and torch.equal(self.loc, other.loc)
            and torch.equal(self.scale, other.scale)
        )

    def __hash__(self) -> int:
        return hash((self.base, *self.loc.flatten().tolist(), *self.scale.flatten().tolist()))

    @property
    def is_normal(self) -> bool:
        return self.base.is_normal

    @property
    def integrates_normal(self) -> bool:
        return self.base.integrates_normal

    @property
    def tempered(self) -> bool:
        return self.base.tempered

    def untempered(self) -> Likelihood:
        return Affine(self.base.untempered(), self.loc, self.scale) if self.tempered else self

    def event(self, output: Shape) -> Shape:
        return self.base.event(output)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        return self.base._check(y, output)

    def parameters(self, output: Shape) -> dict[str, Tensor]:
        return self.base.parameters(output)

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        """Constants that the user gives are in units of y, so they are divided by `self.scale`."""
        return self.base.constants(output, self.scale if scale is None else self.scale * scale)

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        event = self.base.location(f, lead).shape[lead + 1 :]
        log_scale = self._loc_scale(f, lead)[1].log().expand((*f.shape[:lead], 1, *event))
        return self.base.log_prob(f, self._fitted(y, f, lead), theta, lead) - sum_event(
            log_scale, lead
        )

    def location(self, f: Tensor, lead: int = 0) -> Tensor:
        loc, scale = self._loc_scale(f, lead)
        return loc + scale * self.base.location(f, lead)

    def location_variance(self, variance: Tensor, lead: int = 0) -> Tensor:
        scale = self._loc_scale(variance, lead)[1]
        return scale.square() * self.base.location_variance(variance, lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        loc, scale = self._loc_scale(f, lead)
        return loc + scale * self.base.mean(f, theta, lead)

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        scale = self._loc_scale(f, lead)[1]
        return scale.square() * self.base.variance(f, theta, lead)

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        scale = self._loc_scale(f, lead)[1]
        return self.base.entropy(f, theta, lead) + scale.log()

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self.base.cdf(self._fitted(y, f, lead), f, theta, lead)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        loc, scale = self._loc_scale(f, lead)
        return loc + scale * self.base.sample(f, theta, generator, lead)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        """The curvature of the base, because f is in fitted units."""
        return self.base.curvature(f, theta, lead)

    def curvature_draw(
        self, f: Any, theta: Theta, signs: Any, lead: int = 0, y: Any = None
    ) -> Tensor:
        return self.base.curvature_draw(f, theta, signs, lead)

    def _fitted(self, y: Tensor, f: Tensor, lead: int) -> Tensor:
        """y in fitted units, computed in the precision of loc: float32 would lose the digits of a
        large offset."""
        loc, scale = self._loc_scale(f, lead, self.loc.dtype)
        return ((y - loc) / scale).to(f.dtype)

    def _loc_scale(
        self, f: Tensor, lead: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        event = f.ndim - lead - 1
        loc, scale = self.loc.to(f.device), self.scale.to(f.device)
        return per_row(loc, event, f, lead, dtype), per_row(scale, event, f, lead, dtype)


@dataclass(frozen=True)
class ScaledNoise(Likelihood):
    """The likelihood `base`, with noise that is exp(h) times as large.

    The first axis of f has 2D entries: the D outputs of the base, then a log factor h for each.
    `base` has a location and a scale (Gaussian, Student-t): y·exp(-h) has its density at f·exp(-h).
    """

    name: ClassVar[str] = "scaled-noise"
    scales_targets: ClassVar[bool] = True

    base: Likelihood

    @property
    def is_normal(self) -> bool:
        return self.base.is_normal

    @property
    def integrates_normal(self) -> bool:
        return self.base.integrates_normal

    def event(self, output: Shape) -> Shape:
        if not output or output[0] % 2:
            raise ModelError(f"scaled noise needs pairs of outputs, got outputs {tuple(output)}")
        return self.base.event((output[0] // 2, *output[1:]))

    def outputs(self, y: Tensor) -> Shape:
        first, *rest = self.base.outputs(y)
        return (2 * first, *rest)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        return self.base._check(y, output)

    def parameters(self, output: Shape) -> dict[str, Tensor]:
        return self.base.parameters(self.event(output))

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        return self.base.constants(self.event(output), scale)

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        f, h = self._split(f, lead)
        factor = (-h).exp()
        plain = self.base.log_prob(f * factor, y * factor, theta, lead)
        return plain - sum_event(h, lead)

    def location(self, f: Tensor, lead: int = 0) -> Tensor:
        return self._split(f, lead)[0]

    def location_variance(self, variance: Tensor, lead: int = 0) -> Tensor:
        return self.location(variance, lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self.base.mean(self.location(f, lead), theta, lead)

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        f, h = self._split(f, lead)
        return (2.0 * h).exp() * self.base.variance(f, theta, lead)

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        f, h = self._split(f, lead)
        return h + self.base.entropy(f, theta, lead)

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        f, h = self._split(f, lead)
        factor = (-h).exp()
        return self.base.cdf(y * factor, f * factor, theta, lead)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        f, h = self._split(f, lead)
        return h.exp() * self.base.sample(f * (-h).exp(), theta, generator, lead)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        """The Fisher information of the locations, and of h, which is independent of them."""
        f, h = self._split(f, lead)
        size = math.prod(f.shape[lead + 1 :])
        factor = (-h).exp().reshape(*h.shape[: lead + 1], size, 1)
        own = factor * self.base.curvature(f, theta, lead) * factor.mT
        own = torch.nn.functional.pad(own, (0, size, 0, size))
        df = (
            self.base._df(f, theta, lead) if isinstance(self.base, StudentT) else h.new_tensor(1e30)
        )
        of_h = (2.0 * df / (df + 3.0)).expand(f.shape)
        return own + diagonal(torch.cat([torch.zeros_like(of_h), of_h], lead + 1), lead)

    def _split(self, f: Tensor, lead: int) -> tuple[Tensor, Tensor]:
        location, h = f.chunk(2, dim=lead + 1)
        return location, h


_KNOTS = 11  # quantiles of a quantity, between which its rank is interpolated
_ROUNDING = 1e-5  # quantities that vary by less, relative to their size, are constant
_MOST_COLUMNS = 20  # inputs; of more, none is used, only the prediction
_SIZE = 0.01  # of the test
_REPLICAS = 999  # permutations
_PRIOR_STDS = (0.1, 0.2, 0.4, 0.8)
_FOLDS = 5
_STEPS = 20  # of Fisher scoring


@dataclass(frozen=True)
class NoiseScale:
    """log s(x), the log of a factor on the noise: a + Σ_k b_k u_k + c_k u_k².

    Parameters
    ----------
    columns : tuple of int
        The quantities: columns of the inputs, and -1 for the prediction.
    values, ranks : tuple of tuple of float
        For each quantity its knots, in fitted units, and their ranks in [-1, 1].
    linear, square : tuple of float
        b_k and c_k.
    level : float
        a.
    """

    columns: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    ranks: tuple[tuple[float, ...], ...]
    linear: tuple[float, ...]
    square: tuple[float, ...]
    level: float = 0.0

    def log_scale(self, mean: Tensor, x: Tensor) -> Tensor:
        """[N], float64, for the predicted means [N] and the inputs [N, d], in fitted units."""
        u = self.positions(mean, x)
        b, c = (torch.tensor(w, dtype=u.dtype, device=u.device) for w in (self.linear, self.square))
        return self.level + u @ b + u.square() @ c

    def positions(self, mean: Tensor, x: Tensor) -> Tensor:
        """The ranks u of all quantities, [N, K], float64."""
        found = []
        for column, values, ranks in zip(self.columns, self.values, self.ranks, strict=True):
            value = (mean if column < 0 else x[:, column]).double().contiguous()
            knots, at = (
                torch.tensor(t, dtype=torch.float64).to(value.device) for t in (values, ranks)
            )
            above = torch.searchsorted(knots, value).clamp(1, len(knots) - 1)
            low, high = knots[above - 1], knots[above]
            share = ((value - low) / (high - low)).clamp(0.0, 1.0)
            found.append(torch.lerp(at[above - 1], at[above], share))
        return torch.stack(found, 1)

    @staticmethod
    def of(mean: Tensor, x: Tensor) -> NoiseScale | None:
        """Without effects, with the knots of these rows; None if no quantity varies."""
        columns = [-1, *range(x.shape[1] if x.shape[1] <= _MOST_COLUMNS else 0)]
        kept: list[tuple[int, tuple[float, ...], tuple[float, ...]]] = []
        levels = torch.linspace(0.0, 1.0, _KNOTS, dtype=torch.float64)
        for column in columns:
            value = (mean if column < 0 else x[:, column]).double()
            knots, group = torch.quantile(value, levels.to(value.device)).unique(
                return_inverse=True
            )
            if float(knots[-1] - knots[0]) <= _ROUNDING * float(knots.abs().max()):
                continue
            total = torch.zeros_like(knots).index_add(0, group, levels.to(knots))
            ranks = 2.0 * total / group.bincount() - 1.0
            kept.append((column, tuple(knots.tolist()), tuple(ranks.tolist())))
        if not kept:
            return None
        which, values, places = zip(*kept, strict=True)
        none = (0.0,) * len(which)
        return NoiseScale(which, values, places, none, none)


class CalibratedNoise(NamedTuple):
    """A factor on the noise, and the calibrated likelihood under it.

    columns: the quantities that explain most of the factor, the first one first; -1: the
        prediction.
    likelihood: None where it is unchanged.
    p_value: of noise that does not depend on x.
    optimism: how much better the factor scores these rows than factors of cross-validation, on
        average.
    """

    scale: NoiseScale
    columns: tuple[int, ...]
    likelihood: CalibratedLikelihood | None
    p_value: float
    optimism: float


def noise_p_value(z: Tensor, u: Tensor, weight: Tensor, seed: int = 0) -> float:
    """The p-value of |z|, [N], that does not depend on the ranks u, [N, K]: see the module."""
    order = z.abs().double()
    ranks = 0.5 * (
        torch.searchsorted(order.sort().values, order, right=True)
        + torch.searchsorted(order.sort().values, order, right=False)
        + 1
    )
    score = torch.special.ndtri(0.5 * (1.0 + ranks / (len(z) + 1.0))).square()
    share = (weight / weight.sum()).double()
    basis = torch.cat([u, u.square()], 1)
    basis = basis - share @ basis
    # Correlations up to a constant that permutations share; w stays with its row.
    basis = basis * share.unsqueeze(1)
    size = basis.square().sum(0).sqrt()
    basis = basis[:, size > 1e-9 * size.max()] / size[size > 1e-9 * size.max()]
    score = (score - score.mean()).to(basis)
    observed = (score @ basis).abs().amax()
    # A normal approximation is enough far from the size of the test.
    approximate = float(2.0 * torch.special.ndtr(-observed / score.std())) * basis.shape[1]
    if not 1e-6 < approximate < 0.3:
        return min(1.0, approximate)
    source = generator(seed, "noise scale", "permutations")
    larger = 0
    for start in range(0, _REPLICAS, 111):  # blocks of limited size
        count = min(111, _REPLICAS - start)
        shuffled = torch.rand(count, len(z), generator=source).argsort(1).to(score.device)
        larger += int(((score[shuffled] @ basis).abs().amax(1) >= observed).sum())
    return (1 + larger) / (1 + _REPLICAS)


def calibrate_noise_scale(
    likelihood: Likelihood,
    f: Tensor,
    y: Tensor,
    theta: Theta,
    weight: Tensor,
    x: Tensor,
    found: CalibratedLikelihood | None = None,
    stopped: int = 1,
    seed: int = 0,
    mean: Tensor | None = None,
) -> CalibratedNoise | None:
    """A factor on the noise that depends on the prediction and the inputs, by held-out rows.

    None where the test finds no dependence, or no dependence predicts the rows better.

    Parameters
    ----------
    likelihood : Likelihood
        The likelihood in training, with a location and a scale that held-out rows may replace.
    f, y, theta, weight, stopped
        As in `Likelihood.calibrate_held_out`; targets have the shape [N, 1].
    x : Tensor
        The inputs of the rows, in fitted units, [N, d].
    found : CalibratedLikelihood or None
        The calibrated likelihood for noise that does not depend on x.
    seed : int
        The seed of the permutations and of the folds.
    mean : Tensor or None
        The predicted means that the factor may depend on, [N]. None: those of f. They differ if f
        is at the level of single members, which have errors of different sizes.
    """
    own, spread = f.double().mean(0)[:, 0], f.double().var(0, correction=0)[:, 0]
    mean = own if mean is None else mean.double()
    weight = weight.double()
    start = NoiseScale.of(mean, x)
    if start is None:
        return None
    error, u = y.double()[:, 0] - own, start.positions(mean, x)
    base, now = _current(likelihood, found, theta)
    noise = base.variance(f, now, 1).double().mean(0)[:, 0]
    p_value = noise_p_value(error / (noise + spread).sqrt(), u, weight, seed)
    if not p_value <= _SIZE:
        return None
    constant = log_mean_prob(base.log_prob(f, y, now, 1))
    # Where tails are heavy under constant noise, they need no proof under noise that varies.
    tails: dict[str, Any] = {"clear": 0.0} if isinstance(base, StudentT) else {}
    for _ in range(2):  # the family of the noise depends on the factor, and the factor on it
        fitted = _fit_scale(start, base, now, error, spread, u, weight, seed)
        if fitted is None:
            return None
        scale, h = fitted
        factor = (-h).exp().to(f).unsqueeze(1)
        rows = f * factor, y * factor.to(y)
        found = likelihood.calibrate_held_out(*rows, theta, weight, stopped=stopped, **tails)
        before = base
        base, now = _current(likelihood, found, theta)
        if base == before:
            break
    more = 0.0
    if found is None:
        more = map_estimate(
            lambda by: log_mean_prob(base.log_prob(*rows, _louder(base, theta, by), 1)),
            weight, 2.0, 5.0, likelihood.degrees_of_freedom_correction,
        )  # fmt: skip
        now = _louder(base, theta, more)
    new = log_mean_prob(base.log_prob(*rows, now, 1)) - h
    if not significant_gain(new - constant, weight, 1.0):
        return None
    h = scale.log_scale(mean, x)
    factor = (-h).exp().to(f).unsqueeze(1)
    own = log_mean_prob(base.log_prob(f * factor, y * factor.to(y), now, 1)) - h
    optimism = max(0.0, float(weight @ (own - new) / weight.sum()))
    scale = replace(scale, level=scale.level + more)
    return CalibratedNoise(scale, _strongest(scale, u), found, p_value, optimism)


def _strongest(scale: NoiseScale, u: Tensor) -> tuple[int, ...]:
    """The quantities whose u and u² explain at least half as much of the variance of log s as those
    of the first."""
    slopes = [torch.tensor(w).to(u) for w in (scale.linear, scale.square)]
    h = u @ slopes[0] + u.square() @ slopes[1]
    explained = []
    for k in range(u.shape[1]):
        basis = torch.stack([torch.ones_like(h), u[:, k], u[:, k].square()], 1)
        fitted = basis @ (torch.linalg.pinv(basis) @ h)
        explained.append(float(fitted.var()))
    order = sorted(range(len(explained)), key=lambda k: -explained[k])
    return tuple(scale.columns[k] for k in order if explained[k] >= 0.5 * explained[order[0]])


def _current(
    likelihood: Likelihood, found: CalibratedLikelihood | None, theta: Theta
) -> tuple[Likelihood, Theta]:
    """The calibrated likelihood and its parameters."""
    if found is None:
        return likelihood, theta
    level = theta[likelihood.log_scales[0]]
    return found.likelihood, {name: level + by for name, by in found.moved.items()}


def _louder(base: Likelihood, theta: Theta, by: float) -> Theta:
    name = base.log_scales[0]
    return {**theta, name: theta[name] + by}


def _fit_scale(
    start: NoiseScale, base: Likelihood, theta: Theta, error: Tensor, spread: Tensor, u: Tensor,
    weight: Tensor, seed: int,
) -> tuple[NoiseScale, Tensor] | None:  # fmt: skip
    """The factor with the best τ, and log s of each row by a fit without its fold; None if a
    constant is better. An error has the variance of the functions plus that of the noise."""
    df = getattr(base, "df", None) or math.inf
    scale = theta[base.log_scales[0]].double().exp().square().mean()
    fixed = spread * (1.0 - 2.0 / df) / scale  # in units of σ²
    error = error / scale.sqrt()
    basis = torch.cat([u, u.square()], 1)
    centre, size = basis.mean(0), basis.std(0).clamp_min(1e-6)
    basis = (basis - centre) / size
    fold = torch.randperm(len(u), generator=generator(seed, "noise scale", "folds")) % _FOLDS
    fold = fold.to(u.device)

    def cross_fitted(std: float) -> Tensor:
        h = torch.empty_like(error)
        for k in range(_FOLDS):
            seen, new = fold != k, fold == k
            fitted = _fisher_scoring(basis[seen], error[seen], fixed[seen], weight[seen], df, std)
            h[new] = fitted[0] + basis[new] @ fitted[1:]
        return h

    each = {std: cross_fitted(std) for std in (0.0, *_PRIOR_STDS)}
    scores = {std: float(weight @ _log_density(h, error, fixed, df)) for std, h in each.items()}
    best = max(scores, key=lambda std: scores[std])
    if best == 0.0:
        return None
    fitted = _fisher_scoring(basis, error, fixed, weight, df, best)
    slopes = fitted[1:] / size
    level = float(fitted[0] - slopes @ centre)
    count = u.shape[1]
    linear, square = slopes[:count].tolist(), slopes[count:].tolist()
    return replace(start, linear=tuple(linear), square=tuple(square), level=level), each[best]


def _log_density(h: Tensor, error: Tensor, fixed: Tensor, df: float) -> Tensor:
    """The log density of errors with the squared scale fixed + exp(2h), up to a constant."""
    square = fixed + (2.0 * h).exp()
    z = error.square() / square
    tail = 0.5 * z if math.isinf(df) else 0.5 * (df + 1.0) * torch.log1p(z / df)
    return -0.5 * square.log() - tail


def _fisher_scoring(
    basis: Tensor, error: Tensor, fixed: Tensor, weight: Tensor, df: float, std: float
) -> Tensor:
    """(a, b) that maximise Σ w log p(error | h = a + basis b) - |b|²/(2 std²)."""
    design = torch.cat([torch.ones_like(basis[:, :1]), basis], 1)
    penalty = torch.full((design.shape[1],), 1.0 / max(std, 1e-6) ** 2).to(design)
    penalty[0] = 1e-6
    now = torch.zeros_like(penalty)
    information = 2.0 / (1.0 + 3.0 / df)
    for _ in range(_STEPS):
        h = design @ now
        noise = (2.0 * h).exp()
        part = noise / (fixed + noise)  # dlog scale / dh
        z = error.square() / (fixed + noise)
        pull = (z - 1.0) if math.isinf(df) else ((df + 1.0) * z / (df + z) - 1.0)
        slope = design.mT @ (weight * part * pull) - penalty * now
        each = (information * weight * part.square()).unsqueeze(1) * design
        curvature = design.mT @ each + penalty.diag()
        step = torch.linalg.solve(curvature, slope)
        step = step * (1.0 / step.abs().amax()).clamp_max(1.0)
        now = now + step
        if float(step.abs().amax()) < 1e-6:
            break
    return now


@dataclass(frozen=True)
class Heads(Likelihood):
    """Several outputs at once, independent given the network.

    f, y and results are tuples with one entry per head; log-probabilities are summed. Names in
    theta begin with the number of the head: "0.log_noise". To standardise the targets of a head,
    wrap that head in `Affine`.
    """

    name: ClassVar[str] = "heads"

    likelihoods: tuple[Likelihood, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "likelihoods", tuple(self.likelihoods))
        if not self.likelihoods:
            raise ModelError("a model with several heads needs one likelihood for each")

    @property
    def heads(self) -> tuple[Likelihood, ...]:
        return self.likelihoods

    @property
    def tempered(self) -> bool:
        return any(head.tempered for head in self.likelihoods)

    def untempered(self) -> Likelihood:
        return Heads(tuple(head.untempered() for head in self.likelihoods))

    def arrange(self, f: Any) -> Any:
        same = isinstance(f, tuple | list) and len(f) == len(self.likelihoods)
        return tuple(head.arrange(part) for head, part in self._zip(f)) if same else f

    def for_targets(self, y: Any, output: Any) -> Likelihood:
        if not isinstance(y, tuple | list) or len(y) != len(self.likelihoods):
            return self
        each = zip(self.likelihoods, y, output, strict=True)
        found = tuple(head.for_targets(target, shape) for head, target, shape in each)
        return self if found == self.likelihoods else Heads(found)

    def event(self, output: Any) -> Any:
        return tuple(head.event(shape) for head, shape in self._zip(output))

    def prepare_targets(self, y: Any, output: Any) -> Any:
        if not isinstance(y, tuple | list) or len(y) != len(self.likelihoods):
            raise DataError(
                f"targets must be a tuple of {len(self.likelihoods)}, one for each head"
            )
        ready = []
        for i, (head, target, shape) in enumerate(zip(self.likelihoods, y, output, strict=True)):
            try:
                ready.append(head.prepare_targets(target, shape))
            except DataError as error:
                raise type(error)(f"head {i}: {error}") from error
        return tuple(ready)

    def scalar_targets(self, y: Any, output: Any) -> Any:
        each = zip(self.likelihoods, y, output, strict=True)
        return tuple(head.scalar_targets(target, shape) for head, target, shape in each)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        raise NotImplementedError("every head checks its own targets")

    def parameters(self, output: Any) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": value
            for i, (head, shape) in enumerate(self._zip(output))
            for name, value in head.parameters(shape).items()
        }

    def constants(self, output: Any, scale: Any = None) -> dict[str, Tensor]:
        scales = [None] * len(self.likelihoods) if scale is None else scale
        return {
            f"{i}.{name}": value
            for i, (head, shape) in enumerate(self._zip(output))
            for name, value in head.constants(shape, scales[i]).items()
        }

    def theta_of(self, head: int, theta: Theta) -> dict[str, Tensor]:
        """The parameters of one head, without the number in their names."""
        prefix = f"{head}."
        return {n.removeprefix(prefix): v for n, v in theta.items() if n.startswith(prefix)}

    def log_prob(self, f: Any, y: Any, theta: Theta, lead: int = 0) -> Tensor:
        total: Tensor | None = None
        for i, (head, output) in enumerate(self._zip(f)):
            part = head.log_prob(output, y[i], self.theta_of(i, theta), lead)
            total = part if total is None else total + part
        assert total is not None
        return total

    def location(self, f: Any, lead: int = 0) -> Any:
        return tuple(head.location(output, lead) for head, output in self._zip(f))

    def mean(self, f: Any, theta: Theta, lead: int = 0) -> Any:
        return tuple(h.mean(o, self.theta_of(i, theta), lead) for i, (h, o) in self._each(f))

    def variance(self, f: Any, theta: Theta, lead: int = 0) -> Any:
        return tuple(h.variance(o, self.theta_of(i, theta), lead) for i, (h, o) in self._each(f))

    def entropy(self, f: Any, theta: Theta, lead: int = 0) -> Any:
        return tuple(h.entropy(o, self.theta_of(i, theta), lead) for i, (h, o) in self._each(f))

    def sample(self, f: Any, theta: Theta, generator: Generator, lead: int = 0) -> Any:
        return tuple(
            h.sample(o, self.theta_of(i, theta), generator, lead) for i, (h, o) in self._each(f)
        )

    def curvature(self, f: Any, theta: Theta, lead: int = 0, y: Any = None) -> Tensor:
        """Block diagonal, with one block per head."""
        blocks = [
            h.curvature(o, self.theta_of(i, theta), lead, None if y is None else y[i])
            for i, (h, o) in self._each(f)
        ]
        sizes = [block.shape[-1] for block in blocks]
        rows, before = [], 0
        for block, size in zip(blocks, sizes, strict=True):
            after = sum(sizes) - before - size
            rows.append(torch.nn.functional.pad(block, (before, after)))
            before += size
        return torch.cat(rows, dim=-2)

    def curvature_draw(
        self, f: Any, theta: Theta, signs: Any, lead: int = 0, y: Any = None
    ) -> Tensor:
        """The draws of the heads, one after the other."""
        own = [None] * len(self.likelihoods) if y is None else y
        parts = [
            h.curvature_draw(o, self.theta_of(i, theta), signs[i], lead, own[i])
            for i, (h, o) in self._each(f)
        ]
        return torch.cat(parts, -1)

    def _zip(self, values: Sequence[Any]) -> list[tuple[Likelihood, Any]]:
        if len(values) != len(self.likelihoods):
            raise ShapeError(
                f"{len(self.likelihoods)} heads have likelihoods, but {len(values)} were given"
            )
        return list(zip(self.likelihoods, values, strict=True))

    def _each(self, f: Sequence[Any]) -> list[tuple[int, tuple[Likelihood, Any]]]:
        return list(enumerate(self._zip(f)))
