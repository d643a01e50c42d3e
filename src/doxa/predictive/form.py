"""Forms of a predictive: the common base `Form`, forms that hold moments, and quantiles.

A form overrides the quantities that it has; `Form` derives others from them. The rest raise
`Unavailable`, with advice in the message. `Predictive` documents the quantities.

`as_draws`, `complete_theta` and `draw_functions` prepare the components of a mixture. `solve` and
`bisect_whole` find quantiles as roots of a cumulative distribution function, for all elements at
once. `Summary`, `MomentForm`, `NormalForm` and `HeadsForm` hold moments, or one form per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from doxa.errors import DataError, MethodError, ModelError, ShapeError, Unavailable
from doxa.likelihoods import Affine, Gaussian, Likelihood
from doxa.likelihoods.gaussian import HALF_LOG_2PI, standard_normal_cdf
from doxa.noise import generator


def as_draws(values: Any) -> Tensor:
    """Draws as [S, N, *output], floating, of at least single precision."""
    f: Tensor = torch.as_tensor(values)
    if f.ndim < 2 or not f.is_floating_point():
        raise ShapeError(
            f"draws of f must be floats of shape [S, N, ...], got {f.dtype} {list(f.shape)}"
        )
    if f.shape[0] == 0:
        raise DataError("there are no draws: f has shape " + str(list(f.shape)))
    return f.float() if f.dtype in (torch.float16, torch.bfloat16) else f


def complete_theta(
    likelihood: Likelihood, theta: Mapping[str, Tensor] | None, f: Tensor
) -> dict[str, Tensor]:
    """Every likelihood parameter as [S, *own]; fixed parameters come from the likelihood."""
    theta, output = theta or {}, tuple(f.shape[2:])
    constants = likelihood.constants(output)
    complete = {}
    for name, default in {**likelihood.parameters(output), **constants}.items():
        if name not in theta and name not in constants:
            raise ModelError(
                f"a {likelihood.name} likelihood learns {name!r}: give its value in theta, or fix "
                "it in the likelihood (noise=..., scale=...)"
            )
        value = torch.as_tensor(theta.get(name, default)).to(device=f.device, dtype=f.dtype)
        if value.shape == default.shape:
            value = value.expand(f.shape[0], *default.shape)
        elif value.shape != (f.shape[0], *default.shape):
            raise ShapeError(
                f"theta[{name!r}] has shape {list(value.shape)}; {f.shape[0]} draws need "
                f"{[f.shape[0], *default.shape]}"
            )
        complete[name] = value
    return complete


def draw_functions(
    f: Tensor,
    f_variance: Tensor,
    theta: Mapping[str, Tensor],
    weights: Tensor,
    seed: int,
    draws: int,
    first: int = 0,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Replace each Gaussian over f by `draws` draws of it; f becomes [S * draws, N, *output].

    The noise of a component depends on the seed and its number (`first` is that of the first
    component), so that the result does not depend on the chunks.
    """
    noise = torch.stack(
        [
            torch.randn(
                (draws, *f.shape[1:]),
                generator=generator(seed, "predictive", "f", s),
                dtype=f.dtype,
            )
            for s in range(first, first + f.shape[0])
        ]
    ).to(f.device)
    std = f_variance.to(f.dtype).clamp_min(0.0).sqrt()
    drawn = torch.addcmul(f.unsqueeze(1), std.unsqueeze(1), noise).flatten(0, 1)
    repeated = {name: value.repeat_interleave(draws, 0) for name, value in theta.items()}
    return drawn, repeated, weights.repeat_interleave(draws) / draws


def cast_votes(likelihood: Likelihood, f: Tensor) -> Tensor:
    """The vote of each draw from logits [S, N, C, *site], one-hot; [S, N, *event] of 0 and 1 for
    Bernoulli."""
    if likelihood.binary:
        return (f > 0).to(f.dtype)
    return torch.zeros_like(f).scatter(2, f.argmax(2, keepdim=True), 1.0)


class Form:
    """A distribution of y at N rows."""

    likelihood: Likelihood
    only_moments: ClassVar[bool] = False  # only the moments of y are known

    @property
    def splits(self) -> bool:
        """Whether the uncertainty splits into epistemic and aleatoric."""
        return True

    @property
    def guaranteed_level(self) -> float | None:
        """The level for which conformal prediction calibrated the interval or set, if it did."""
        return None

    @property
    def has_samples(self) -> bool:
        """Whether the draws of functions are there: `samples` and their `weights`."""
        return False

    @property
    def of_draws(self) -> Form:
        """The plain mixture of the functions, where the form is computed from it; else itself."""
        return self

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
        """One form for each head; the form itself where there is one."""
        return (self,)

    def votes(self) -> Tensor:
        raise self.unavailable("votes", "it is for classification")

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        raise self.unavailable("normals", "its components are not normal, or were not kept")

    def targets(self, y: Any) -> Tensor:
        """y as a tensor on the device, checked against the rows and outputs of this predictive."""
        raise self.unavailable("log_prob")

    def log_prob(self, y: Tensor) -> Tensor:
        """log p of checked targets: [N]."""
        raise self.unavailable("log_prob")

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) at checked targets: [N, *event]."""
        raise self.unavailable("cdf")

    def quantile(self, level: float) -> Tensor:
        raise self.unavailable("quantile")

    def quantiles(self, levels: Tensor) -> Tensor:
        """Quantiles at many levels [L]: [L, N, *event]."""
        return torch.stack([self.quantile(level) for level in levels.tolist()])

    def sample(self, n: int, seed: int) -> Tensor:
        raise self.unavailable("sample")

    def interval(self, level: float | None) -> tuple[Tensor, Tensor]:
        level = 0.95 if level is None else level
        return self.quantile(0.5 * (1.0 - level)), self.quantile(0.5 * (1.0 + level))

    def prediction_set(self, level: float | None) -> Tensor:
        """The most probable classes whose total probability reaches the level: bool [N, C, *site].

        Among classes of equal probability, the lower number comes first.
        """
        probs = self.class_table()
        if not bool(torch.isfinite(probs).all()):
            raise DataError(
                "the predicted probabilities are not finite: there is no prediction set"
            )
        ordered, order = probs.sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(1) - ordered
        chosen = before < (0.95 if level is None else level)
        return torch.zeros_like(chosen).scatter(1, order, chosen)

    def class_table(self) -> Tensor:
        """Class probabilities with the classes on axis 1, in float64: [N, C, *site]; [N, 2, *event]
        (of 0 and 1) for Bernoulli."""
        if not self.likelihood.classifies:
            raise self.unavailable("prediction_set", "it is for classification; use interval")
        probs = self.probs.double()
        if self.likelihood.binary:
            return torch.stack([1.0 - probs, probs], 1)
        return probs

    @property
    def variance(self) -> Tensor:
        try:
            return self.aleatoric + self.epistemic
        except Unavailable:
            if not self.likelihood.classifies:
                raise
            return self.mean * (1.0 - self.mean)  # of a class indicator

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
        """H[y] computed directly; for classes it follows from the mean."""
        if not self.likelihood.classifies:
            raise self.unavailable(
                "entropy",
                "a mixture of densities has no closed form of it; moment_matched().entropy is "
                "an upper bound",
            )
        return self.likelihood.entropy_of(self.mean)

    @property
    def mutual_information(self) -> Tensor:
        # The exact difference is never negative, but rounding may make it so.
        return (self.marginal_entropy - self.expected_entropy).clamp_min(0.0)

    @property
    def probs(self) -> Tensor:
        if not self.likelihood.classifies:
            raise self.unavailable("probs", "it is for classification; use mean and std")
        return self.mean

    @property
    def variation_ratio(self) -> Tensor:
        probs = self.probs
        if self.likelihood.binary:
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
    if bool((weights == 0).any()):  # entries of weight zero may be infinite or undefined
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


Cdf = Callable[[Tensor], Tensor]
_MOST_STEPS = 2100  # float64 has no more halvings than this between its largest and smallest


def normal_quantile(level: float) -> float:
    return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))


def solve(cdf: Cdf, level: float | Tensor, low: Tensor, high: Tensor) -> Tensor:
    """y with cdf(y) = level up to rounding, given cdf(low) <= level <= cdf(high).

    There is one level for all elements, or one for each. Chandrupatla's method (1997): an inverse
    quadratic step through the last three points where these are smooth enough, else bisection;
    about 10 evaluations instead of 50.
    """
    tolerance = 2.0 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
    a, b, c = high, low, low  # the newest point, one across the root, the one before
    fa, fb = cdf(a) - level, cdf(b) - level
    fc, step = fb, torch.full_like(low, 0.5)
    for _ in range(_MOST_STEPS):
        best = torch.where(fa.abs() < fb.abs(), a, b)
        width = (b - a).abs()
        # Undefined elements count as converged, so that the search ends.
        if bool(((width <= tolerance) | (fa == 0) | (fb == 0) | ~torch.isfinite(width)).all()):
            break
        new = a + step * (b - a)
        f_new = cdf(new) - level
        same_side = torch.sign(f_new) == torch.sign(fa)
        c, fc = torch.where(same_side, a, b), torch.where(same_side, fa, fb)
        b, fb = torch.where(same_side, b, a), torch.where(same_side, fb, fa)
        a, fa = new, f_new
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        smooth = (phi.square() < xi) & ((1.0 - phi).square() < 1.0 - xi)
        quadratic = fa / (fb - fa) * fc / (fb - fc)
        quadratic = quadratic + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        least = (0.5 * tolerance / (b - a).abs()).nan_to_num(0.5).clamp_max(0.5)
        step = torch.where(smooth & torch.isfinite(quadratic), quadratic, 0.5)
        step = torch.minimum(torch.maximum(step, least), 1.0 - least)
    return best


def bisect_whole(cdf: Cdf, level: float, low: Tensor, high: Tensor) -> Tensor:
    """The smallest whole y with cdf(y) >= level, given cdf(low) < level <= cdf(high)."""
    for _ in range(_MOST_STEPS):
        if not bool((high - low > 1.0).any()):
            break
        middle = (0.5 * (low + high)).floor()
        reached = cdf(middle) >= level
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle)
    return high


def widen(
    cdf: Cdf, level: float, low: Tensor, high: Tensor, width: Tensor
) -> tuple[Tensor, Tensor]:
    """Move the bounds outwards, twice as far each time, until the quantile lies between them."""
    step = width
    for _ in range(_MOST_STEPS):
        too_high, too_low = cdf(low) > level, cdf(high) < level
        if not bool((too_high | too_low).any()):
            break
        low = torch.where(too_high, low - step, low)
        high = torch.where(too_low, high + step, high)
        step = 2.0 * step
    return low, high


class Derived(Form):
    """A form that is made from another one, its base, for the same targets."""

    def __init__(self, base: Form) -> None:
        self.base, self.likelihood = base, base.likelihood

    @property
    def splits(self) -> bool:
        return self.base.splits

    def targets(self, y: Any) -> Tensor:
        return self.base.targets(y)


class KeepsDraws(Derived):
    """A derived form whose draws of functions are those of the base."""

    @property
    def has_samples(self) -> bool:
        return self.base.has_samples

    @property
    def samples(self) -> Tensor:
        return self.base.samples

    @property
    def weights(self) -> Tensor:
        return self.base.weights

    def votes(self) -> Tensor:
        return self.base.votes()


class Summary(Form):
    """A form that holds a mean, variances and expected entropy."""

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
    """The result of `Moments`, which keeps no draws.

    Only moments are known, except for single labels, whose distribution is given by their mean.
    """

    only_moments = True

    def log_prob(self, y: Tensor) -> Tensor:
        return self.likelihood.log_prob(self._single_label("log_prob"), y, {})

    def targets(self, y: Any) -> Tensor:
        # For continuous likelihoods the mean has the shape of the targets.
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
        if self.likelihood.classifies:
            return self.likelihood.logits(self.mean)
        raise self.unavailable(quantity)

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        if not instead:
            instead = "only moments were kept; predict with keep='samples'"
            if not self.likelihood.discrete:
                instead += ", or use moment_matched(), the Gaussian with these moments"
        return super().unavailable(quantity, instead)


class NormalForm(Summary):
    """Independent normals with given moments, one for each element of y."""

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
    """One form for each of several heads; joint quantities are not available."""

    def __init__(self, likelihood: Likelihood, heads: Sequence[Form]) -> None:
        self.likelihood = likelihood
        self._heads = tuple(heads)

    @property
    def splits(self) -> bool:
        return False

    @property
    def heads(self) -> tuple[Form, ...]:
        return self._heads

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super().unavailable(
            quantity, f"it has {len(self._heads)} heads; use one of them, as in heads[0].{quantity}"
        )


class AffineForm(Form):
    """A form of fitted targets z, for y = loc + scale z."""

    def __init__(self, likelihood: Affine, base: Form, output: tuple[int, ...]) -> None:
        self.likelihood: Affine = likelihood
        self.base, self._output = base, output

    @property
    def splits(self) -> bool:
        return self.base.splits

    def _scale(self, values: Tensor) -> Tensor:
        """The scale of y, for values [..., N, *event]."""
        return self.likelihood.scale.to(values)

    def _units(self, z: Tensor) -> Tensor:
        """z in units of y, [..., N, *event]."""
        return self.likelihood.loc.to(z) + self._scale(z) * z

    def _fitted(self, y: Tensor) -> Tensor:
        """y in fitted units. The difference is computed in the precision of loc."""
        loc, scale = self.likelihood.loc.to(y.device), self.likelihood.scale.to(y.device)
        return ((y - loc) / scale).to(self.base.mean.dtype)

    @property
    def mean(self) -> Tensor:
        return self._units(self.base.mean)

    @property
    def aleatoric(self) -> Tensor:
        return self._scale(self.base.aleatoric).square() * self.base.aleatoric

    @property
    def epistemic(self) -> Tensor:
        return self._scale(self.base.epistemic).square() * self.base.epistemic

    @property
    def variance(self) -> Tensor:
        return self._scale(self.base.variance).square() * self.base.variance

    @property
    def expected_entropy(self) -> Tensor:
        entropy = self.base.expected_entropy
        return entropy + self._scale(entropy).log()

    @property
    def marginal_entropy(self) -> Tensor:
        entropy = self.base.marginal_entropy
        return entropy + self._scale(entropy).log()

    @property
    def samples(self) -> Tensor:
        return self._units(self.base.samples)

    @property
    def weights(self) -> Tensor:
        return self.base.weights

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        weights, mean, std = self.base.normals()
        return weights, self._units(mean), self._scale(std) * std

    def targets(self, y: Any) -> Tensor:
        mean, ready = self.base.mean, self.likelihood.prepare_targets(y, self._output)
        return check_rows(ready.to(mean.device), len(mean))

    def log_prob(self, y: Tensor) -> Tensor:
        z = self._fitted(y)
        log_scale = self._scale(z).log().expand_as(z)
        return self.base.log_prob(z) - log_scale.reshape(len(z), math.prod(z.shape[1:])).sum(1)

    def cdf(self, y: Tensor) -> Tensor:
        return self.base.cdf(self._fitted(y))

    def quantile(self, level: float) -> Tensor:
        return self._units(self.base.quantile(level))

    def interval(self, level: float | None) -> tuple[Tensor, Tensor]:
        low, high = self.base.interval(level)
        return self._units(low), self._units(high)

    def sample(self, n: int, seed: int) -> Tensor:
        return self._units(self.base.sample(n, seed))


def moments(form: Form) -> Form:
    """The moments of a form, as `Moments` would return them."""
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
