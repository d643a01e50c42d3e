"""Recalibration: a posterior whose predictions are corrected on held-out rows.

`recalibrate` checks the calibration rows, fits one of the transforms below, and returns the
transformed posterior.

Smooth convex losses are minimised by L-BFGS with steps by the strong Wolfe conditions (Nocedal and
Wright, 2006, ch. 7), in coordinates where their curvature is about the same in every direction.
Nothing is random: the same rows give the same parameters, never worse than the start.

Histogram binning and isotonic regression have one curve per class, from probability to probability.
With two classes (and Bernoulli) one curve for the second class is exact. With more classes, each
has a curve against the rest, and the results are divided by their sum; if all are 0 the row keeps
its original probabilities. Because of the division there is no guarantee for several classes.

Histogram binning: a probability becomes the share of the class among rows in the same bin.

    q = #{n : p_n in the bin, y_n = c} / #{n : p_n in the bin}

Zadrozny and Elkan (2001). Bins are [a, b), the last one closed; of equal width, or holding equally
many calibration rows (`equal_mass`). Probabilities in an empty bin are not changed. Shares of 0 and
1 occur in small bins; where they are wrong, the log loss is infinite.

Isotonic regression: the best increasing curve from predicted to observed probability.

    min_g Σ_n (y_n - g(p_n))²,   g increasing

Zadrozny and Elkan (2002); solved exactly by pooling adjacent violators (Ayer et al., 1955), with
equal predictions pooled first. The solution also minimises the log loss among increasing curves, of
which the identity is one: with two classes the log-likelihood of the calibration rows never gets
worse. Between the rows' predictions the curve is linear, outside them constant.

A curve may reach 0 or 1, and then the log loss of a later row that contradicts it is infinite.
`floor` keeps the probabilities of each curve within [floor, 1 - floor]; the guarantee is then lost.

Temperature scaling: one parameter that sharpens or flattens all probabilities.

    q = softmax(log p̄ / T),    T = argmin_T  -Σ_n log q_n(y_n)

Guo, Pleiss, Sun and Weinberger (2017). On the averaged probabilities p̄, where the loss is convex
in 1/T and has p̄ itself at T = 1: on the rows it is fitted to, the log-likelihood never gets worse.
The likeliest class stays what it was. T lies in [0.01, 1e8]: 0.01 when every row is classified
correctly, so that no T is sharp enough; 1e8, which is uniform, when the classes are ranked worse
than by chance. Where no T matters (uniform predictions) it is 1.

Vector and Dirichlet scaling: multinomial logistic regression on log-probabilities.

    vector      q = softmax(a ⊙ log p̄ + b)          Guo, Pleiss, Sun and Weinberger (2017)
    Dirichlet   q = softmax(W log p̄ + b)            Kull, Perello-Nieto, Kängsepp et al. (2019)

Both losses are convex and hold p̄ itself (a = 1, W = I, b = 0), where the search starts: without
regularisation the log-likelihood of the calibration rows never gets worse. Dirichlet scaling has
C² + C parameters; ODIR, its authors' regularisation, adds

    off_diagonal / (C (C - 1)) Σ_{i≠j} W_ij²  +  intercept / C  Σ_j b_j²

to the mean loss. Rows that are perfectly separable have no finite optimum: the search ends when no
entry of the gradient of the mean loss is above 1e-10. With Bernoulli, no and yes are the two
classes, and all outputs of a row share the parameters.

Variance scaling: standard deviations times one factor for each output.

    s² = (1/n) Σ_n ((y_n - m_n) / σ_n)²

the maximum-likelihood factor of the Gaussian with the predictive's moments (Laves et al., 2020;
Levi et al., 2022). The predictive is stretched about its mean, whatever its shape.

Quantile recalibration: events of predicted probability u had the frequency R(u).

    R(u) = P(F_n(y_n) <= u),    F'(y) = R(F(y))

Kuleshov, Fenner and Ermon (2018). R passes through the empirical quantiles of the calibration rows'
F_n(y_n) and is linear between them: at the levels k/K, K = ⌈√n⌉, and in the tails also where 1, 2,
4, 8, … rows lie outside. With `knots` given it is K = knots and nothing else (n + 1 is the paper's
curve, through every row, whose density is rough). Each output has an R of its own. Points that
coincide are moved apart by a share of 1e-9, so that all slopes are positive and finite.

If a predictive is far too narrow, most F_n(y_n) are so close to 0 or 1 that they are equal in
floating point; rescale it first with kind="variance".
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import checks, store
from doxa.data import rows_of
from doxa.errors import DataError, MethodError, did_you_mean
from doxa.likelihoods import Heads, Likelihood
from doxa.posterior import Posterior, PredictiveTransform, TransformedPosterior
from doxa.predictive import Predictive
from doxa.predictive.calibrated import (
    CalibratedClasses,
    PiecewiseLinear,
    Rescaled,
    Warped,
    log_probs,
)
from doxa.predictive.form import HeadsForm, check_rows


@dataclass(frozen=True)
class Labelled:
    """n labels and the logarithms of their averaged class probabilities."""

    log_probs: Tensor  # [n, C], float64
    y: Tensor  # [n]

    def check_classes(self, kind: str) -> None:
        """Every class must occur where each gets parameters of its own."""
        counts = self.y.bincount(minlength=self.log_probs.shape[1])
        absent = (counts == 0).nonzero().flatten().tolist()
        if not absent:
            return
        named = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
        raise DataError(
            f"no calibration row is of class {named}: {kind!r} would give it no probability; add "
            "rows, or use kind='temperature', which has one parameter for all classes"
        )


class ClassMap(PredictiveTransform):
    """A recalibration of class probabilities: from log p̄ to log q, on axis 1."""

    @abstractmethod
    def map(self, table: Tensor) -> Tensor:
        """[N, C, *site] to [N, C, *site], float64."""

    def __call__(self, p: Predictive) -> Predictive:
        form = p.form
        return p.of_form(CalibratedClasses(form, self.map(log_probs(form))))


def pair(data: Any) -> tuple[Any, Any]:
    """(x, y) as given."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError("calibration data must be a pair (x, y) of held-out rows")
    return data[0], data[1]


def check_unseen(posterior: Posterior, x: Any, y: Any, instead: str = "") -> None:
    """Raise an error for rows of the fit: they are predicted better than new rows."""
    used, n = posterior.count_fitted(x, y), rows_of(posterior.read(x), "x")
    if used:
        raise DataError(
            f"{used} of the {n} calibration rows were used by the fit, to train on or to stop by: "
            "predictions look better at them than at new rows. Give rows that were not passed to "
            f"fit{instead}"
        )


def check_one_head(p: Predictive) -> None:
    if isinstance(p.form, HeadsForm):
        raise MethodError(
            f"this posterior has {len(p.form.heads)} heads; only predictions of one head can be "
            "recalibrated or made conformal"
        )


def labelled(p: Predictive, y: Any) -> Labelled:
    """Every label that counts, of all sites, with its probabilities."""
    table = log_probs(p.form)
    bad = ~torch.isfinite(table).reshape(len(table), -1).all(1)
    if bool(bad.any()):
        raise DataError(f"the prediction at calibration row {int(bad.nonzero()[0])} is not finite")
    target = p.likelihood.prepare_targets(y, tuple(p.form.mean.shape[1:])).to(table.device)
    label = check_rows(target, len(table)).long().flatten()
    rows = table.movedim(1, -1).reshape(len(label), table.shape[1])
    if p.likelihood.ignore_index is not None:
        counted = label != p.likelihood.ignore_index
        rows, label = rows[counted], label[counted]
    if len(label) == 0:
        raise DataError("every calibration label is ignored: there is nothing to fit to")
    return Labelled(rows, label)


def residuals(p: Predictive, y: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, standard deviation) [n, *event] in float64, finite."""
    mean, std = p.form.mean.double(), p.form.std.double()
    bad = ~(torch.isfinite(mean) & torch.isfinite(std)).reshape(len(mean), -1).all(1)
    if bool(bad.any()):
        raise DataError(f"the prediction at calibration row {int(bad.nonzero()[0])} is not finite")
    return p.form.targets(y).double(), mean, std


def minimise(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """θ of any shape, by L-BFGS: of the smallest loss that it saw, the start's included."""
    theta = start.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    search = torch.optim.LBFGS(
        [theta], max_iter=500, history_size=50, tolerance_grad=1e-10, tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    least, best = math.inf, start

    def closure() -> Tensor:
        nonlocal least, best
        search.zero_grad()
        value = loss(theta)
        value.backward()
        if value.item() < least:
            least, best = value.item(), theta.detach().clone()
        return value

    search.step(closure)
    return best


class OneVsRest(ClassMap):
    """Curves, counted from 0; with two classes there is only curve 0."""

    @abstractmethod
    def curve(self, c: int, probs: Tensor) -> Tensor:
        """Any shape to the same shape."""

    def map(self, table: Tensor) -> Tensor:
        probs = table.exp()
        if probs.shape[1] == 2:
            yes = self.curve(0, probs[:, 1])
            return torch.stack([1.0 - yes, yes], 1).log()
        each = torch.stack([self.curve(c, probs[:, c]) for c in range(probs.shape[1])], 1)
        total = each.sum(1, keepdim=True)
        return torch.where(total > 0, (each / total).log(), table)


def curves_of(log_probs: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(probability, 0 or 1) of each curve to fit."""
    probs = log_probs.exp()
    classes = [1] if probs.shape[1] == 2 else range(probs.shape[1])
    return [(probs[:, c].contiguous(), (y == c).double()) for c in classes]


@store.register("recalibrate.histogram")
@dataclass(frozen=True, eq=False)
class Histogram(OneVsRest):
    """Inner edges and shares of each curve; NaN where a bin was empty."""

    edges: Tensor  # [curves, bins - 1]
    shares: Tensor  # [curves, bins]

    def curve(self, c: int, probs: Tensor) -> Tensor:
        share = self.shares.to(probs)[c][_bin(probs, self.edges.to(probs)[c])]
        return torch.where(torch.isnan(share), probs, share)


def fit_histogram(rows: Labelled, *, bins: int = 15, equal_mass: bool = False) -> Histogram:
    checks.whole("bins", bins)
    rows.check_classes("histogram")
    edges, shares = [], []
    inner = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64)[1:-1].to(rows.log_probs.device)
    for probs, hit in curves_of(rows.log_probs, rows.y):
        own = _quantiles(probs, inner) if equal_mass else inner
        place = _bin(probs, own)
        count = torch.bincount(place, minlength=bins)
        total = torch.zeros_like(count, dtype=hit.dtype).scatter_add_(0, place, hit)
        edges.append(own)
        shares.append(total / count)  # 0 / 0 is NaN: an empty bin
    return Histogram(torch.stack(edges), torch.stack(shares))


def _bin(probs: Tensor, inner: Tensor) -> Tensor:
    return torch.bucketize(probs.contiguous(), inner.contiguous(), right=True)


def _quantiles(values: Tensor, levels: Tensor) -> Tensor:
    """Values such that the bins between them hold equally many, to within one."""
    ordered = values.sort()[0]
    return ordered[(levels * len(ordered)).round().long().clamp_max(len(ordered) - 1)]


@store.register("recalibrate.isotonic")
@dataclass(frozen=True, eq=False)
class Isotonic(OneVsRest):
    """The corners (predicted, observed) of each curve."""

    curves: tuple[tuple[Tensor, Tensor], ...]

    def curve(self, c: int, probs: Tensor) -> Tensor:
        x, y = (t.to(probs) for t in self.curves[c])
        if len(x) == 1:
            return y.expand(probs.shape).clone()
        inside = probs.clamp(float(x[0]), float(x[-1])).contiguous()
        right = torch.searchsorted(x, inside).clamp(1, len(x) - 1)
        x0, x1, y0, y1 = x[right - 1], x[right], y[right - 1], y[right]
        share = (inside - x0) / (x1 - x0)
        return torch.where(y0 == y1, y0, (1.0 - share) * y0 + share * y1)


def fit_isotonic(rows: Labelled, *, floor: float = 0.0) -> Isotonic:
    if not 0.0 <= floor < 0.5:
        raise MethodError(f"floor must lie in [0, 0.5), not {floor!r}")
    rows.check_classes("isotonic")
    corners = [pool_adjacent_violators(*own) for own in curves_of(rows.log_probs, rows.y)]
    return Isotonic(tuple((x, y.clamp(floor, 1.0 - floor)) for x, y in corners))


def pool_adjacent_violators(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The corners (increasing x, value) of the least-squares increasing function of x [n]."""
    places, index, counts = x.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(places).scatter_add_(0, index, y)
    blocks: list[tuple[float, int, int]] = []  # sum, weight, how many places
    for total, weight in zip(sums.tolist(), counts.tolist(), strict=True):
        block = (total, weight, 1)
        while blocks and blocks[-1][0] * block[1] >= block[0] * blocks[-1][1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    sizes = torch.tensor([size for _, _, size in blocks], device=x.device)
    means = [total / weight for total, weight, _ in blocks]
    values = torch.tensor(means, dtype=x.dtype, device=x.device)
    last = sizes.cumsum(0) - 1
    first = last - sizes + 1
    corners = torch.stack([first, last], 1).flatten().unique_consecutive()
    return places[corners], values.repeat_interleave(sizes)[corners]


_MOST_STEPS = 200


@store.register("recalibrate.temperature")
@dataclass(frozen=True)
class Temperature(ClassMap):
    """Probabilities to the power 1 / temperature, normalised."""

    temperature: float

    def map(self, table: Tensor) -> Tensor:
        return torch.log_softmax(table / self.temperature, 1)


def fit_temperature(rows: Labelled) -> Temperature:
    """The root of the derivative, by Newton steps on log(1/T) kept inside a bracket."""
    z = rows.log_probs - rows.log_probs.amax(1, keepdim=True)
    of_label = z.gather(1, rows.y.unsqueeze(1)).squeeze(1)

    def derivatives(log_beta: float) -> tuple[float, float]:
        """The first and second of the mean loss with respect to log β, β = 1/T."""
        beta = math.exp(log_beta)
        probs = torch.softmax(beta * z, 1)
        expected = (probs * z).sum(1)
        spread = (probs * (z - expected.unsqueeze(1)).square()).sum(1).mean()
        slope = beta * float((expected - of_label).mean())
        return slope, beta * beta * float(spread) + slope

    slope, _ = derivatives(0.0)
    if slope == 0.0:
        return Temperature(1.0)
    low, high = (0.0, math.log(1e2)) if slope < 0 else (-math.log(1e8), 0.0)
    end = high if slope < 0 else low
    if derivatives(end)[0] * slope > 0:  # it still falls at the end of the range
        return Temperature(math.exp(-end))
    at = 0.0
    for _ in range(_MOST_STEPS):
        slope, curvature = derivatives(at)
        low, high = (at, high) if slope < 0 else (low, at)
        new = at - slope / curvature if curvature > 0 else math.inf
        if not low < new < high:
            new = 0.5 * (low + high)
        if slope == 0.0 or abs(new - at) <= 1e-14 * max(1.0, abs(at)):
            break
        at = new
    return Temperature(math.exp(-at))


@store.register("recalibrate.vector")
@dataclass(frozen=True, eq=False)
class Vector(ClassMap):
    """A factor and an offset for each class."""

    scale: Tensor  # [C]
    bias: Tensor  # [C]

    def map(self, table: Tensor) -> Tensor:
        own = (1, -1, *[1] * (table.ndim - 2))
        scale, bias = (t.to(table).reshape(own) for t in (self.scale, self.bias))
        return torch.log_softmax(table * scale + bias, 1)


@store.register("recalibrate.dirichlet")
@dataclass(frozen=True, eq=False)
class Dirichlet(ClassMap):
    """A matrix and an offset."""

    matrix: Tensor  # [C, C]
    bias: Tensor  # [C]

    def map(self, table: Tensor) -> Tensor:
        matrix, bias = self.matrix.to(table), self.bias.to(table)
        logits = (table.movedim(1, -1) @ matrix.t() + bias).movedim(-1, 1)
        return torch.log_softmax(logits, 1)


def fit_vector(rows: Labelled) -> Vector:
    rows.check_classes("vector")
    z = rows.log_probs
    centre, spread = z.mean(0), z.std(0, unbiased=False)
    spread = torch.where(spread > 1e-12 * centre.abs(), spread, 1.0)
    fitted = (z - centre) / spread

    def loss(theta: Tensor) -> Tensor:
        return _mean_loss(fitted * theta[0] + theta[1], rows.y)

    theta = minimise(loss, torch.stack([spread, centre]))
    scale = theta[0] / spread
    return Vector(scale, theta[1] - scale * centre)


def fit_dirichlet(
    rows: Labelled, *, off_diagonal: float = 0.0, intercept: float = 0.0
) -> Dirichlet:
    for name, value in (("off_diagonal", off_diagonal), ("intercept", intercept)):
        if not 0.0 <= value < float("inf"):
            raise MethodError(f"{name} must be a number, zero or more, not {value!r}")
    rows.check_classes("dirichlet")
    z, classes = rows.log_probs, rows.log_probs.shape[1]
    table = torch.cat([z, z.new_ones(len(z), 1)], 1)
    # Twice the weights of the squares, over the typical curvature 1/C of the loss.
    squares = table.new_full((classes + 1,), 2.0 * off_diagonal / max(classes - 1, 1))
    squares[-1] = 2.0 * intercept
    whiten = _whitening(torch.cat([table, (len(table) * squares).sqrt().diag()]), len(table))
    design = table @ whiten
    eye = torch.eye(classes, dtype=z.dtype, device=z.device)
    start = torch.cat([eye, eye.new_zeros(1, classes)])

    def loss(theta: Tensor) -> Tensor:
        value = _mean_loss(design @ theta, rows.y)
        if off_diagonal or intercept:
            raw = whiten @ theta
            off = (raw[:-1] * (1.0 - eye)).square().sum() / (classes * (classes - 1))
            value = value + off_diagonal * off + intercept * raw[-1].square().mean()
        return value

    first = torch.linalg.solve(whiten, start)
    raw = start + whiten @ (minimise(loss, first) - first)
    return Dirichlet(raw[:-1].t().contiguous(), raw[-1])


def _mean_loss(logits: Tensor, y: Tensor) -> Tensor:
    of_label = logits.gather(1, y.unsqueeze(1)).squeeze(1)
    return (torch.logsumexp(logits, 1) - of_label).mean()


def _whitening(table: Tensor, n: int) -> Tensor:
    """[D, D], invertible, such that the columns of table @ it are orthogonal, of length √n;
    directions in which the table does not vary are left as they are."""
    triangle = torch.linalg.qr(table, mode="r")[1] / n**0.5
    _, values, directions = torch.linalg.svd(triangle, full_matrices=True)
    scale = table.new_ones(table.shape[1])
    scale[: len(values)] = torch.where(values > 1e-10 * values[0], values, 1.0)
    return directions.t() / scale


@store.register("recalibrate.variance")
@dataclass(frozen=True, eq=False)
class Variance(PredictiveTransform):
    """Standard deviations times `factor` [*event]."""

    factor: Tensor

    def __call__(self, p: Predictive) -> Predictive:
        return p.of_form(Rescaled(p.form, self.factor))


def fit_variance(p: Predictive, y: Any) -> Variance:
    target, mean, std = residuals(p, y)
    factor = ((target - mean) / std).square().mean(0).sqrt()
    if not bool((torch.isfinite(factor) & (factor > 0)).all()):
        raise DataError(
            "the calibration rows give no positive factor: a predicted standard deviation is 0, "
            "or every row is predicted exactly"
        )
    return Variance(factor)


_APART = 1e-9


@store.register("recalibrate.quantile")
@dataclass(frozen=True, eq=False)
class Quantile(PredictiveTransform):
    """R of each output as a piecewise linear curve: predicted levels (`said`) and observed
    frequencies (`happened`)."""

    said: Tensor  # [E, K]
    happened: Tensor  # [E, K]

    def __call__(self, p: Predictive) -> Predictive:
        place = p.form.mean.device
        curve = PiecewiseLinear(self.said.to(place), self.happened.to(place))
        return p.of_form(Warped(p.form, curve))


def fit_quantile(p: Predictive, y: Any, *, knots: int | None = None) -> Quantile:
    u = p.cdf(y).double().flatten(1) if p.mean.ndim > 1 else p.cdf(y).double().unsqueeze(1)
    bad = ~torch.isfinite(u).all(1)
    if bool(bad.any()):
        raise DataError(f"the prediction at calibration row {int(bad.nonzero()[0])} is not finite")
    n = len(u)
    levels = _levels(n, knots).to(u)
    # The i-th of n ordered values stands at level i / (n + 1); 0 and 1 stand at their own.
    ordered = torch.cat([torch.zeros_like(u[:1]), u.sort(0)[0], torch.ones_like(u[:1])])
    place = levels * (n + 1)
    below = place.long().clamp_max(n)
    share = (place - below).unsqueeze(1)
    predicted = ((1.0 - share) * ordered[below] + share * ordered[below + 1]).t()  # [E, K]
    observed = levels.expand_as(predicted)
    apart = (1.0 - _APART) * predicted + _APART * observed
    return Quantile(apart.contiguous(), observed.clone())


def _levels(n: int, knots: int | None) -> Tensor:
    """From 0 to 1, increasing."""
    pieces = math.ceil(math.sqrt(n)) if knots is None else checks.whole("knots", knots)
    levels = torch.arange(pieces + 1, dtype=torch.float64) / pieces
    if knots is not None:
        return levels
    outside = 2.0 ** torch.arange(math.ceil(math.log2(n + 1)), dtype=torch.float64) / (n + 1)
    outside = outside[outside < 0.9 / pieces]
    return torch.cat([levels, outside, 1.0 - outside]).unique()


__all__ = [
    "Dirichlet", "Histogram", "Isotonic", "Quantile", "Temperature", "Variance", "Vector",
    "recalibrate",
]  # fmt: skip

CLASSES: dict[str, Callable[..., Any]] = {
    "temperature": fit_temperature,
    "vector": fit_vector,
    "dirichlet": fit_dirichlet,
    "isotonic": fit_isotonic,
    "histogram": fit_histogram,
}
NUMBERS: dict[str, Callable[..., Any]] = {"quantile": fit_quantile, "variance": fit_variance}


def recalibrate(
    posterior: Posterior, data: Any, kind: str = "temperature", **options: Any
) -> TransformedPosterior:
    """Correct the predictions of a posterior on held-out rows.

    Parameters
    ----------
    posterior : Posterior
        Any posterior. It may be transformed.
    data : tuple (x, y)
        Held-out rows: on its training rows a network is more accurate than on new ones, so its
        confidence would look right. Rows that were passed to `fit` are an error
        (`doxa.data.fitted_rows` documents how they are recognised), except if the fit read them
        from a stream.
    kind : str, default "temperature"
        For classes "temperature", "vector", "dirichlet", "isotonic" or "histogram"; for numbers
        "quantile" or "variance".
    **options
        Options of the kind: dirichlet `off_diagonal`, `intercept` (0: no regularisation); isotonic
        `floor`; histogram `bins`, `equal_mass`; quantile `knots`.

    Returns
    -------
    TransformedPosterior
        Its `transform` holds the fitted parameters, for example `.transform.temperature`.

    Notes
    -----
    Probabilities are corrected after averaging over members and draws, since the average is what is
    scored. On the average, temperature, vector, unregularised Dirichlet and two-class isotonic
    never decrease the log-likelihood of the calibration rows. Entropy and variance are split into
    epistemic and aleatoric parts in the proportions of the base posterior. `functions`, `draw` and
    `features` are those of the base posterior.
    """
    x, y = pair(data)
    fitter = _fitter(kind, posterior.base_likelihood)
    known = [
        name
        for name, parameter in inspect.signature(fitter).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            raise MethodError(f"{kind!r} has no option {name!r}{did_you_mean(name, known)}")
    check_unseen(posterior, x, y)
    p = posterior.predict(x)
    check_one_head(p)
    transform = fitter(labelled(p, y), **options) if kind in CLASSES else fitter(p, y, **options)
    return TransformedPosterior(posterior, transform)


def _fitter(kind: str, likelihood: Likelihood) -> Callable[..., Any]:
    every = CLASSES | NUMBERS
    if kind not in every:
        raise MethodError(f"no recalibration named {kind!r}{did_you_mean(str(kind), every)}")
    if isinstance(likelihood, Heads):
        raise MethodError(
            f"this posterior has {len(likelihood.likelihoods)} heads; only predictions of one "
            "head can be recalibrated"
        )
    if likelihood.discrete and not likelihood.classifies:
        raise MethodError(
            f"no recalibration is for counts, which this {likelihood.name} posterior predicts; "
            "conformal(posterior, data, kind='split') gives intervals that hold"
        )
    possible = CLASSES if likelihood.classifies else NUMBERS
    if kind not in possible:
        what = "classes" if kind in CLASSES else "numbers"
        raise MethodError(
            f"{kind!r} recalibrates predictions of {what}, but this posterior's likelihood is "
            f"{likelihood.name}; for it there are: {', '.join(possible)}"
        )
    return every[kind]
