"""Yardsticks: cheap models of a table, which a fit should not be worse than.

    constant            the best prediction that ignores the inputs
    linear              ridge regression on the standardised inputs
    gp                  a Gaussian process with a Matérn kernel, on inducing points
    nearest-neighbours  the mean of the k nearest rows
    boosted-trees       gradient boosting with symmetric trees

Each has its settings, and its noise, from predictions of rows that it was not fitted to (held-out
predictions): each row on its own, or parts of rows that the caller gives. Neighbours leave the part
out, trees are cross-fitted, and the first three are ridge regressions on features φ. There, with
the slope g_i and the curvature h_i of the loss of row i in its output f_i, and H = Σ hφφᵀ + λI,

    f_i without row i   =  f_i + a_i g_i / (1 − a_i h_i),      a_i = φ_iᵀ H⁻¹ φ_i
    w without part B    =  w + (H − Σ_B hφφᵀ)⁻¹ Σ_B gφ

These are exact for squared errors. Otherwise the first is an approximation (Rad and Maleki, 2020),
and the second is the first of a few steps of Newton's method with a fixed Hessian.

One model serves all targets: the outputs f are means, logits or log rates, as those of a network
are. The noise is that of the fit's likelihood, by the rule of the fit (`Likelihood`): a noise level
from squared errors, Student-t noise where the rows clearly have it, the temperature of classes. A
noise level that the user gave is used as it is.

The approximation of the kernel is that of Williams and Seeger (2001); the trees are those of
Prokhorenkova et al. (2018), all folds at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from doxa.data.rows import per_effective_row
from doxa.errors import Unavailable
from doxa.likelihoods import (
    Gaussian,
    Likelihood,
)
from doxa.likelihoods.base import Shape, map_estimate
from doxa.noise import generator

MOST_COLUMNS = 512
MOST_OUTPUTS = 16
FEWEST_ROWS = 8
MOST_ROWS = 500  # rows that a yardstick is fitted to, at most
_INDUCING, _INDUCING_FOR_LOGITS = 128, 64
_LENGTHS = (0.1, 0.25, 0.6, 1.5, 4.0)  # of the kernel, times the root of the columns
_PENALTIES = tuple(10.0**k for k in range(-3, 4))
_NEIGHBOURS = (1, 2, 3, 5, 8, 12, 20, 35)
_PENALTIES_OF_LOGITS = (0.1, 1.0, 10.0, 100.0)
_NEWTON, _CHORD = 10, 5  # steps, and steps with a fixed Hessian
_LONGEST, _SHORTEST = 3.0, 1e-2  # changes of a logit or log rate in a step: largest; at the end
_BOUND = {"mean": 1.0, "logit": 1.0, "softmax": 2.0, "log": 1.0}  # of a Hessian by its blocks
_LARGEST = 30.0  # |f| of a log rate or logit
_FOLDS, _TREES, _DEPTH, _RATE, _SHRINK = 4, 30, 3, 0.3, 1.0
_CUTS, _FEWEST_CUTS, _MOST_CUTS = 96, 7, 63  # thresholds: of all columns, of each
_FEWEST_OF_TREES = 30  # rows
_LARGEST_LOG = 10.0  # largest logarithm of a concentration, and minus the smallest


@dataclass(frozen=True)
class Yardstick:
    """A fitted model.

    Parameters
    ----------
    name : str
        One of the names above.
    location : callable
        The outputs [N, O] at inputs [N, D], in fitted units.
    likelihood : Likelihood
        The noise.
    theta : dict of Tensor
        The likelihood's parameters.
    held_out : Tensor
        The log predictive density of each row that it was fitted to, in units of y, by a model
        without its part: [N].
    optimism : float
        The expected excess of the mean of `held_out` over that of new rows: settings and noise were
        chosen on these rows. It is 1/m for each number that m rows have chosen (Akaike, 1974).
    scale : tuple of Tensor, default None
        Location and scale of the fitted units of y, [O] each.
    """

    name: str
    location: Callable[[Tensor], Tensor]
    likelihood: Likelihood
    theta: dict[str, Tensor]
    held_out: Tensor
    optimism: float
    scale: tuple[Tensor, Tensor] | None = None

    def log_prob(self, x: Any, y: Any) -> Tensor:
        """The log predictive density of each row, [N], in units of y."""
        y = _targets(torch.as_tensor(y), self.likelihood)
        if self.scale is not None:
            y = (y - self.scale[0]) / self.scale[1]
        score = self.likelihood.log_prob(self.location(_table(x)), y, self.theta)
        return score if self.scale is None else score - self.scale[1].log().sum()


def why_untested(x: Any, y: Any, likelihood: Likelihood) -> str:
    """The reason if there are no yardsticks for such rows, else an empty string."""
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
        return "the inputs are not a table of numbers"
    if x.shape[1] > MOST_COLUMNS:
        return f"the inputs have more than {MOST_COLUMNS} columns"
    masked = likelihood.ignore_index is not None
    if likelihood.link is None or likelihood.tempered or masked:
        return "there are no yardsticks for this likelihood"
    outputs = y.shape[1] if isinstance(y, Tensor) and y.ndim == 2 else 1
    if not isinstance(y, Tensor) or y.ndim > 2 or (likelihood.class_axis and y.ndim > 1):
        return "the targets are not a table"
    if likelihood.class_axis:
        outputs = int(y.max()) + 1
    if outputs > MOST_OUTPUTS:
        return f"there are more than {MOST_OUTPUTS} outputs"
    return ""


def yardsticks(
    x: Any, y: Any, likelihood: Likelihood, weight: Tensor | None = None, seed: int = 0,
    parts: Tensor | None = None, classes: int = 0,
) -> list[Yardstick]:  # fmt: skip
    """Fit the yardsticks to rows, at most `MOST_ROWS`: of more, to evenly spaced ones.

    Parameters
    ----------
    x : Tensor
        Inputs [N, D], in any units.
    y : Tensor
        Targets [N] or [N, O], in any units.
    likelihood : Likelihood
        The likelihood of the fit that they are compared with.
    weight : Tensor, default None
        One positive weight per row.
    seed : int, default 0
        The seed of the inducing points and of the folds.
    parts : Tensor, default None
        The number of the part of each row, [N], counted from 0; −1 for rows that no part holds out.
        Held-out predictions of a row come from models without its part. Those of the other rows
        come from models without the row, or for trees a fold. None: each row is a part.
    classes : int, default 0
        The number of classes, if it may be larger than those in y.

    Returns
    -------
    list of Yardstick
        Without those that could not be fitted.

    Raises
    ------
    Unavailable
        If there are no yardsticks for such data; `why_untested` gives the reason before.
    """
    why = why_untested(x, y, likelihood)
    if not why and len(x) < FEWEST_ROWS:
        why = f"yardsticks need at least {FEWEST_ROWS} rows"
    if why:
        raise Unavailable(f"no yardsticks: {why}")
    some = torch.linspace(0, len(x) - 1, min(len(x), MOST_ROWS)).round().long()
    part = None if parts is None else parts.cpu()[some]
    x, target = _table(x)[some], _targets(y.cpu()[some], likelihood)
    counts = per_effective_row(None if weight is None else weight.cpu()[some])
    each = torch.ones(len(x), dtype=torch.float64) if counts is None else counts
    share = each / each.sum()
    middle = share @ x
    spread = (share @ (x - middle).square()).sqrt()
    spread = torch.where(spread > 1e-12 * middle.abs(), spread, math.inf)  # constant columns: 0
    link, scale = str(likelihood.link), None
    if link == "mean":
        loc = share @ target
        std = (share @ (target - loc).square()).sqrt()
        scale = loc, std.clamp_min(torch.finfo(torch.float32).eps)
        target = (target - scale[0]) / scale[1]
    shown = target
    if link == "softmax":
        shown = one_hot(target, max(classes, 2, int(target.max()) + 1)).double()
    rows = _Rows((x - middle) / spread, shown, each, part, link, _start(shown, share, link))

    fitted: dict[str, _Model] = {}
    for name, fit in _MODELS.items():
        with suppress(torch.linalg.LinAlgError):
            model = fit(rows, seed)
            if model is not None and bool(torch.isfinite(model.held_out).all()):
                fitted[name] = model
    noisy = partial(_noise, likelihood, y=target, weight=each, scale=scale)
    best = min(fitted, key=lambda name: float(rows.loss(fitted[name].held_out)))
    shape = noisy(fitted[best].held_out)[0]  # normal or Student-t: the same for all
    found = []
    for name, model in fitted.items():
        noise, theta, chosen = noisy(model.held_out, shape=shape)
        score = noise.log_prob(model.held_out, target, theta)
        score = score if scale is None else score - scale[1].log().sum()

        def location(new: Tensor, of: Callable[[Tensor], Tensor] = model.outputs) -> Tensor:
            return of((new - middle) / spread)

        optimism = (_SETTINGS[name] + chosen) / float(each.sum())
        found.append(Yardstick(name, location, noise, theta, score, optimism, scale))
    return found


class _Rows(NamedTuple):
    """The rows that a yardstick is fitted to, in float64.

    x: standardised, [N, D]. y: standardised targets, labels, one column for each class, or counts,
    [N, O]. weight: [N], adds up to the effective number of rows. part: [N], or None. link: how f
    gives the mean of y. start: f of a constant, [O].
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    part: Tensor | None
    link: str
    start: Tensor

    def slopes(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The first and second derivative of −log p(y | f) in each output."""
        if self.link == "mean":
            return f - self.y, torch.ones_like(f)
        f = f.clamp(-_LARGEST, _LARGEST)
        if self.link == "log":
            return f.exp() - self.y, f.exp()
        p = torch.sigmoid(f) if self.link == "logit" else torch.softmax(f, -1)
        return p - self.y, p * (1 - p)

    def loss(self, f: Tensor) -> Tensor:
        """−Σ log p(y | f) up to a constant, of outputs [..., N, O]: [...]."""
        if self.link == "mean":
            each = 0.5 * (f - self.y).square()
        elif self.link == "log":
            each = f.clamp(-_LARGEST, _LARGEST).exp() - self.y * f
        elif self.link == "logit":
            each = torch.nn.functional.softplus(f) - self.y * f
        else:
            each = -self.y * torch.log_softmax(f, -1)
        return each.sum(-1) @ self.weight

    def masks(self) -> Tensor:
        """Which rows each part holds out, [parts, N]."""
        assert self.part is not None
        return self.part == torch.arange(int(self.part.max()) + 1)[:, None]


class _Model(NamedTuple):
    """outputs: f [N, O] at standardised inputs. held_out: f of each row, by a model without it."""

    outputs: Callable[[Tensor], Tensor]
    held_out: Tensor


def _start(y: Tensor, share: Tensor, link: str) -> Tensor:
    mean, one = share @ y, 1.0 / len(y)
    if link == "mean":
        return torch.zeros_like(mean)
    if link == "log":
        return mean.clamp_min(1e-3).log()
    if link == "logit":
        return torch.logit((mean + one) / (1 + 2 * one))
    return ((mean + one) / (1 + y.shape[1] * one)).log()


def _table(x: Any) -> Tensor:
    return torch.as_tensor(x).detach().cpu().double()


def _targets(y: Tensor, likelihood: Likelihood) -> Tensor:
    """Labels [N], or numbers [N, O]."""
    y = y.detach().cpu()
    return y.long() if likelihood.class_axis else y.double().reshape(len(y), -1)


def _noise(
    likelihood: Likelihood, f: Tensor, y: Tensor, weight: Tensor,
    scale: tuple[Tensor, Tensor] | None, shape: Likelihood | None = None,
) -> tuple[Likelihood, dict[str, Tensor], int]:  # fmt: skip
    """The likelihood and its parameters, by held-out outputs f [N, O]; and how many numbers were
    estimated. `shape` is normal or Student-t noise, if that is known."""
    output: Shape = tuple(f.shape[1:])
    learned = likelihood.parameters(output)
    if likelihood.link != "mean" and not learned:
        plain = likelihood.plain() if likelihood.classifies else likelihood
        found = plain.calibrate_held_out(f[None], y, {}, weight, stopped=0)
        plain = plain if found is None else found.likelihood
        return plain, dict(plain.constants(output)), int(found is not None)
    if likelihood.link != "mean":  # one number, such as the concentration of counts
        (name,) = learned

        def score(value: float) -> Tensor:
            return likelihood.log_prob(f, y, {name: torch.tensor(value, dtype=torch.float64)})

        best = map_estimate(score, weight, _LARGEST_LOG, math.inf)
        return likelihood, {name: torch.tensor(best, dtype=torch.float64)}, 1
    assert scale is not None
    given = likelihood.constants(output, scale[1])
    if given and not learned:
        return likelihood, dict(given), 0
    rows = float(weight.sum())
    fewer = rows / max(rows - Gaussian.degrees_of_freedom_correction, 1.0)
    square = (weight @ (f - y).square()) / rows * fewer  # [O]
    if not likelihood.per_output:
        square = square.mean()
    floor = torch.finfo(torch.float32).eps
    noise = {"log_noise": 0.5 * square.clamp_min(floor**2).log()}
    plain = Gaussian(per_output=likelihood.per_output)
    if shape is not None and shape.heavy_tailed:
        student, log_noise = shape, noise["log_noise"]

        def at(u: float) -> Tensor:
            return student.log_prob(f, y, {"log_scale": log_noise + u})

        return student, {"log_scale": log_noise + map_estimate(at, weight, 2.0, math.inf)}, 2
    free = (likelihood.assumed or likelihood.heavy_tailed) and not likelihood.per_output
    if shape is not None or not free:
        return plain, noise, square.numel()
    z = (f - y) / noise["log_noise"].exp()
    excess = float((weight @ z.pow(4)).mean()) / rows - 3.0
    if excess < math.sqrt(24.0 / rows):  # its standard error for normal noise
        return plain, noise, square.numel()
    assumed = replace(plain, assumed=True)
    found = assumed.calibrate_held_out(
        f[None], y, {"log_noise": noise["log_noise"].reshape(1)}, weight, stopped=0
    )
    if found is None:
        return plain, noise, square.numel()
    return found.likelihood, {"log_scale": noise["log_noise"] + found.moved["log_scale"]}, 2


def _constant(rows: _Rows, seed: int) -> _Model:
    one = lambda x: x.new_ones(len(x), 1)  # noqa: E731
    return _best_ridge(rows, one)[1]


def _linear(rows: _Rows, seed: int) -> _Model:
    return _best_ridge(rows, _with_one)[1]


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x.new_ones(len(x), 1), x], 1)


def _gaussian_process(rows: _Rows, seed: int) -> _Model:
    """A linear function plus a Gaussian process; the length scale is that of the best leave-one-out
    errors, of squared errors for every target."""
    order = torch.randperm(len(rows.x), generator=generator("yardsticks", seed))
    count = _INDUCING if rows.link == "mean" else _INDUCING_FOR_LOGITS
    points = rows.x[order[:count]].contiguous()

    def features(length: float) -> Callable[[Tensor], Tensor]:
        width = length * math.sqrt(points.shape[1])
        own = _matern(points, points, width)
        root = torch.linalg.cholesky(own + 1e-6 * torch.eye(len(own), dtype=own.dtype))

        def of(x: Tensor) -> Tensor:
            local = torch.linalg.solve_triangular(root, _matern(points, x, width), upper=False)
            return torch.cat([_with_one(x), local.mT], 1)

        return of

    squared = rows
    if rows.link != "mean":
        y = rows.y.log1p() if rows.link == "log" else rows.y
        middle = (rows.weight @ y) / rows.weight.sum()
        squared = rows._replace(y=y - middle, link="mean", start=torch.zeros_like(middle))
    lengths = {length: features(length) for length in _LENGTHS}
    found = {length: _best_ridge(squared, of) for length, of in lengths.items()}
    best = min(found, key=lambda length: found[length][0])
    return found[best][1] if squared is rows else _best_ridge(rows, lengths[best])[1]


def _matern(a: Tensor, b: Tensor, width: float) -> Tensor:
    """The Matérn kernel with smoothness 3/2."""
    distance = torch.cdist(a, b) * (math.sqrt(3.0) / width)
    return (1.0 + distance) * torch.exp(-distance)


def _best_ridge(rows: _Rows, features: Callable[[Tensor], Tensor]) -> tuple[float, _Model]:
    """The ridge regression on features whose penalty has the least leave-one-out loss, and that
    loss."""
    phi = features(rows.x)
    coefficients, held_out, penalties = (_squared if rows.link == "mean" else _newton)(rows, phi)
    loss = rows.loss(held_out).nan_to_num(math.inf)
    best = int(loss.argmin())
    chosen, f = coefficients[best], held_out[best]
    if rows.part is not None:
        f = _without_parts(rows, phi, chosen, penalties[best], f)

    def outputs(x: Tensor) -> Tensor:
        return rows.start + features(x) @ chosen

    return float(rows.loss(f).nan_to_num(math.inf)), _Model(outputs, f)


def _squared(rows: _Rows, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each penalty, the coefficients [P, F, O] and the outputs [P, N, O] without each row, in
    closed form by the spectrum of ΦᵀWΦ; and the penalties."""
    w, penalty = rows.weight[:, None], torch.tensor(_PENALTIES, dtype=phi.dtype)
    values, vectors = torch.linalg.eigh(phi.mT @ (w * phi))
    turned = phi @ vectors  # [N, F]
    shrink = 1.0 / (values.clamp_min(0.0) + penalty[:, None])  # [P, F]
    solved = shrink[..., None] * (turned.mT @ (w * (rows.y - rows.start)))  # [P, F, O]
    f = rows.start + turned @ solved
    a = (shrink @ turned.square().mT)[..., None]  # [P, N, 1]
    left = (1.0 - a * w).clamp_min(1e-6)
    return vectors @ solved, f + a * w * (f - rows.y) / left, penalty


def _newton(rows: _Rows, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for logits and log rates, by Newton's method. Each output has its own block of the
    Hessian; twice the blocks bound that of a softmax."""
    w = rows.weight[:, None]
    penalties = torch.tensor(_PENALTIES_OF_LOGITS, dtype=phi.dtype)
    penalty = penalties[:, None, None]
    eye = torch.eye(phi.shape[1], dtype=phi.dtype)
    coefficient = phi.new_zeros(len(penalty), phi.shape[1], rows.y.shape[1])

    def hessian(h: Tensor, scale: float) -> Tensor:
        """[P, O, F, F] of curvatures [P, N, O]."""
        each = (scale * w * h).mT[..., None] * phi  # [P, O, N, F]
        return phi.mT @ each + penalty[..., None] * eye

    for _ in range(_NEWTON):
        g, h = rows.slopes(rows.start + phi @ coefficient)
        slope = phi.mT @ (w * g) + penalty * coefficient  # [P, F, O]
        step = _solve(torch.linalg.cholesky(hessian(h, _BOUND[rows.link])), slope)
        moved = (phi @ step).abs().amax((-1, -2), keepdim=True)
        coefficient = coefficient - step * (_LONGEST / moved.clamp_min(_LONGEST))
        if float(moved.max()) < _SHORTEST:
            break
    f = rows.start + phi @ coefficient
    g, h = rows.slopes(f)
    root = torch.linalg.cholesky(hessian(h, 1.0))
    a = torch.linalg.solve_triangular(root, phi.mT, upper=False).square().sum(-2).mT  # [P, N, O]
    left = (1.0 - a * w * h).clamp_min(0.05)
    return coefficient, f + a * w * g / left, penalties


def _solve(root: Tensor, slope: Tensor) -> Tensor:
    """H⁻¹ slope [..., F, O] by Cholesky factors of the Hessian of each output, [..., O, F, F]."""
    return torch.cholesky_solve(slope.mT[..., None], root)[..., 0].mT


def _without_parts(
    rows: _Rows, phi: Tensor, chosen: Tensor, penalty: Tensor, alone: Tensor
) -> Tensor:  # fmt: skip
    """The outputs [N, O] of each row by the ridge regression without its part; `alone`, by the one
    without the row, are those of rows that no part holds out."""
    masks, w, f = rows.masks(), rows.weight[:, None], alone.clone()
    h = rows.slopes(rows.start + phi @ chosen)[1] * w * _BOUND[rows.link]  # [N, O]
    eye = penalty * torch.eye(phi.shape[1], dtype=phi.dtype)
    for mask in masks:
        rest = ~mask
        weight, own = w[rest], phi[rest]
        each = h[rest, :1] if rows.link == "mean" else h[rest]
        root = torch.linalg.cholesky(own.mT @ (each.mT[..., None] * own) + eye)
        coefficient, kept = chosen, rows._replace(y=rows.y[rest])
        for _ in range(1 if rows.link == "mean" else _CHORD):
            slope = own.mT @ (weight * kept.slopes(rows.start + own @ coefficient)[0])
            step = _solve(root, slope + penalty * coefficient)
            moved = (own @ step).abs().max().clamp_min(_LONGEST)
            coefficient = coefficient - (step if rows.link == "mean" else step * (_LONGEST / moved))
        f[mask] = rows.start + phi[mask] @ coefficient
    return f


def _nearest_neighbours(rows: _Rows, seed: int) -> _Model | None:
    fewest = len(rows.x) - 1
    if rows.part is not None:  # the rows outside of the largest part
        fewest = len(rows.x) - int(rows.masks().sum(1).max())
    counts = [k for k in _NEIGHBOURS if k <= fewest]
    if not counts:
        return None
    most = max(counts)

    def outputs(distance: Tensor) -> Tensor:
        """f for each number of neighbours, [K, N, O], by distances [N, rows]. One row that is the
        mean of all counts as one more neighbour, except for squared errors."""
        near = distance.topk(most, largest=False, sorted=True).indices  # [N, most]
        w = rows.weight[near]
        total = w.cumsum(1)[:, [k - 1 for k in counts]].mT[..., None]  # [K, N, 1]
        sums = (w[..., None] * rows.y[near]).cumsum(1)[:, [k - 1 for k in counts]].movedim(1, 0)
        if rows.link == "mean":
            return sums / total
        mean = (rows.weight @ rows.y / rows.weight.sum()).clamp_min(1e-3)
        mean = mean.clamp_max(1 - 1e-3) if rows.link == "logit" else mean
        value = (sums + mean) / (total + 1.0)
        return torch.logit(value) if rows.link == "logit" else value.log()

    apart = torch.cdist(rows.x, rows.x).fill_diagonal_(math.inf)
    if rows.part is not None:
        together = (rows.part[:, None] == rows.part) & (rows.part >= 0)
        apart = apart.masked_fill(together, math.inf)
    held_out = outputs(apart)
    best = int(rows.loss(held_out).argmin())
    return _Model(lambda x: outputs(torch.cdist(x, rows.x))[best], held_out[best])


def _boosted_trees(rows: _Rows, seed: int) -> _Model | None:
    """Each tree asks the same question of all its nodes of a level, so that a tree of depth d is d
    columns with a threshold each. All folds, and all rows, are replicas of one computation; the
    number of trees is that with the least held-out loss."""
    n, outputs = rows.y.shape
    if n < _FEWEST_OF_TREES:
        return None
    order = torch.randperm(n, generator=generator("yardsticks", "folds", seed))
    fold = torch.empty(n, dtype=torch.long)
    fold[order] = torch.arange(n) % _FOLDS
    if rows.part is not None:  # parts that are many are joined; other rows have the folds left over
        count = int(rows.part.max()) + 1
        others = count + fold % (_FOLDS - count) if count < _FOLDS else fold
        fold = torch.where(rows.part < 0, others, rows.part % _FOLDS)
    seen = (fold != torch.arange(_FOLDS)[:, None]).double()
    seen = torch.cat([seen, torch.ones(1, n)]) * rows.weight  # [R, N]
    each = min(_MOST_CUTS, max(_FEWEST_CUTS, _CUTS // rows.x.shape[1]))
    shares = torch.linspace(0, 1, each + 2, dtype=torch.float64)[1:-1]
    cuts = torch.quantile(rows.x, shares, 0).mT.reshape(-1)  # [D · cuts]
    column = torch.arange(rows.x.shape[1]).repeat_interleave(each)
    above = rows.x[:, column] > cuts  # [N, D · cuts]
    dense = above.float()
    f = rows.start.expand(_FOLDS + 1, n, outputs)
    trees: list[tuple[Tensor, Tensor]] = []
    held_out = [f[0]]
    for _ in range(_TREES):
        g, h = (value * seen[..., None] for value in rows.slopes(f))
        both = torch.cat([g, h], -1).mT.float()  # [R, 2 O, N]
        leaf = torch.zeros(_FOLDS + 1, n, dtype=torch.long)
        asked = []
        for level in range(_DEPTH):
            inside = one_hot(leaf, 2**level).mT.float()  # [R, L, N]
            parted = inside[:, :, None] * both[:, None]  # [R, L, 2 O, N]
            right, total = parted @ dense, parted.sum(-1, keepdim=True)
            gain = _score(right, outputs) + _score(total - right, outputs)
            question = gain.sum((1, 2)).argmax(-1)  # [R]
            asked.append(question[-1])
            leaf = 2 * leaf + above[:, question].mT
        sums = (one_hot(leaf, 2**_DEPTH).mT.double() @ torch.cat([g, h], -1)).split(outputs, -1)
        value = -_RATE * sums[0] / (sums[1] + _SHRINK)  # [R, leaves, O]
        f = f + value.gather(1, leaf[..., None].expand(-1, -1, outputs))
        trees.append((torch.stack(asked), value[-1]))
        held_out.append(f[fold, torch.arange(n)])
    best = int(rows.loss(torch.stack(held_out)).argmin())
    if best == 0:
        return None
    asks = torch.stack([ask for ask, _ in trees[:best]])  # [T, depth]
    values = torch.stack([value for _, value in trees[:best]])  # [T, leaves, O]
    power = torch.tensor([2**level for level in reversed(range(_DEPTH))])

    def predict(x: Tensor) -> Tensor:
        leaf = ((x[:, column[asks]] > cuts[asks]) * power).sum(-1)  # [N, T]
        return rows.start + values[torch.arange(best), leaf].sum(1)

    return _Model(predict, held_out[best])


def _score(sums: Tensor, outputs: int) -> Tensor:
    """G²/(H + λ) of sums [..., 2 O, cuts]."""
    g, h = sums.split(outputs, -2)
    return g.square() / (h + _SHRINK)


_MODELS: dict[str, Callable[[_Rows, int], _Model | None]] = {
    "constant": _constant,
    "linear": _linear,
    "gp": _gaussian_process,
    "nearest-neighbours": _nearest_neighbours,
    "boosted-trees": _boosted_trees,
}
_SETTINGS = {"constant": 0, "linear": 1, "gp": 2, "nearest-neighbours": 1, "boosted-trees": 1}
