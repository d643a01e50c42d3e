"""Sparse Gaussian-process layers: values at inducing points represent the whole function.

**The layer** (`Layer`).

    u = f(Z) = L v,   LLᵀ = K_ZZ,   a(x) = L⁻¹ k_Z(x),   q(v_o) = N(m_o, S_o)
    q(f_o(x)) = N(a(x)ᵀ m_o,  k(x, x) − |a(x)|² + a(x)ᵀ S_o a(x))
    KL[q(u) ‖ p(u)] = ½ Σ_o (tr S_o + |m_o|² − Z − log |S_o|)

Titsias (2009), Hensman et al. (2013). v is whitened: its prior is N(0, I) for any kernel. All
members are computed at once, in float64; outputs share the kernel and the points.

**Random features** (`features`) of a composed kernel: z_f with E z_f(x) z_f(x') = k(x, x').

    rbf, matern, rq, periodic   √2 cos(ωᵀx/ℓ + b), ω of the kernel's spectrum (Bochner)
    linear, polynomial          ±gᵀx and products of such, g ~ N(0, I)
    relu1, relu2, relu3         ± the last hidden units of a random network of so many layers
    k₁ + k₂,  k₁ k₂             z₁ + z₂,  z₁ z₂

Rahimi & Recht (2007). A Matérn kernel of ν has Student-t frequencies with 2ν degrees of freedom. A
rational quadratic mixes lengthscales by a gamma distribution (by Wilson and Hilferty's cube). A
periodic kernel is an RBF of (cos, sin)(2πx/p). The random numbers are the same at every call.

**Function draws** (`draw`). Whole functions are drawn at a cost that is linear in the number of
rows, and each row can be evaluated separately.

    f(x) = a(x)ᵀ(m + Rε) + r(x),   r(x) = ψ(x)ᵀw · (√(k(x, x) − |a(x)|²)/|ψ(x)|),   ε, w ~ N(0, I)
    ψ(x) = φ(x) − Φ(Z)ᵀL⁻ᵀa(x)

After Wilson et al. (2020): the part of f that the inducing points do not determine is drawn from
the prior in random features φ, minus its part at the inducing points. The last factor makes the
variance at every row exact; between rows, the correlation of r is that of the features.

The file also has the initial inducing points, which are chosen among the rows, and the sums over
rows that determine q(v) of the last layer.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.errors import DataError
from doxa.function.evidence import sample_rows
from doxa.function.kernels import Composed, Leaf, Node, Sum, label_of
from doxa.likelihoods import Theta
from doxa.linalg.layout import Params
from doxa.method import Run, State
from doxa.noise import Noise

FEATURES = 1024  # in pairs of waves, a quarter turn apart
_FREEDOM = {"matern": 5, "matern12": 1, "matern32": 3, "matern52": 5}  # 2ν


def features(kernel: Composed, hyper: Tensor, x: Tensor) -> Tensor:
    """φ(x) [1, N, F] for one member's hyper-parameters [1, H], with E φ(x)ᵀφ(x') = k(x, x')."""
    values = kernel.layout.unflatten(hyper.exp())
    return _of(kernel.tree, values, x) / math.sqrt(FEATURES)


def _of(node: Node, values: Params, x: Tensor, inside: bool = False) -> Tensor:
    """The features of a tree; a single kernel `inside` a product has no variance."""
    if isinstance(node, Sum):
        return functools.reduce(operator.add, (_of(part, values, x) for part in node.parts))
    if isinstance(node, Leaf):
        found = _leaf(node, values, x)
    else:
        parts = (_of(part, values, x, True) for part in node.parts)
        found = functools.reduce(operator.mul, parts)
    variance = None if inside else values.get(f"{label_of(node)}.variance")
    return found if variance is None else variance.sqrt() * found


def _leaf(leaf: Leaf, values: Params, x: Tensor) -> Tensor:
    noise = Noise(0, f"features/{leaf.label}", [0], x.device, x.dtype)
    own = lambda name: values[f"{leaf.label}.{name}"]  # noqa: E731  # [1, 1, 1 or D]
    sign = noise.uniform((1, FEATURES), 0, 1).sub(0.5).sign()
    half = FEATURES // 2
    turn = 2 * math.pi * noise.uniform((1, half), 0, 2)
    turn = torch.cat([turn, turn + math.pi / 2], 2)
    if leaf.name == "constant":
        return sign.expand(1, x.shape[1], -1)
    if leaf.name == "linear":
        return sign * (x @ noise.normal((x.shape[2], FEATURES), 0, 3))
    if leaf.name.startswith("polynomial"):
        wide = torch.cat([x, own("offset").sqrt().expand(1, x.shape[1], 1)], 2)
        each = [
            wide @ noise.normal((wide.shape[2], FEATURES), 0, 4 + i)
            for i in range(int(leaf.name[-1]))
        ]
        return sign * functools.reduce(operator.mul, each)
    if leaf.name.startswith("relu"):
        units = torch.cat([x / own("lengthscale"), torch.ones_like(x[..., :1])], 2)
        for i in range(int(leaf.name[-1])):
            weights = noise.normal((units.shape[2], FEATURES), 0, 4 + i)
            units = math.sqrt(2.0) * (units @ weights).relu() / (math.sqrt(FEATURES) if i else 1.0)
        return sign * units
    if leaf.name == "cosine":  # one column each
        column = (noise.uniform((half,), 0, 3)[0] * x.shape[2]).long() % x.shape[2]
        angle = (2 * math.pi * x / own("period"))[:, :, column.repeat(2)]
        return math.sqrt(2.0) * (angle + turn).cos()
    if leaf.name == "periodic":
        around = 2 * math.pi * x / own("period")
        x = torch.cat([part / own("lengthscale") for part in (around.cos(), around.sin())], 2)
    else:
        x = x / own("lengthscale")
    waves = noise.normal((x.shape[2], half), 0, 3)
    if leaf.name in _FREEDOM:
        freedom = _FREEDOM[leaf.name]
        waves = waves * (freedom / noise.normal((freedom, half), 0, 4).square().sum(1)).sqrt()
    if leaf.name == "rq":
        alpha = own("alpha")
        cube = 1 - 1 / (9 * alpha) + noise.normal((1, half), 0, 4) / (3 * alpha.sqrt())
        waves = waves * (cube.clamp_min(0.0) ** 3).sqrt()
    return math.sqrt(2.0) * ((x @ waves).repeat(1, 1, 2) + turn).cos()


JITTER = 1e-8  # of the mean variance at the inducing points


class Layer(NamedTuple):
    """The posterior of a layer: the logarithms of its kernel [M, H], its points [M, Z, D], and q(v)
    with means [M, O, Z] and square roots R of the covariances, S = RRᵀ, [M, O, Z, Z]."""

    kernel: Composed
    hyper: Tensor
    points: Tensor
    mean: Tensor
    root: Tensor

    def marginals(self, x: Tensor, basis: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at each row of x [M, N, D]: [M, N, O] each."""
        a = whitened(self.kernel, self.hyper, self.points, x) if basis is None else basis
        spread = (self.root.mT @ a.unsqueeze(1)).square().sum(2)  # [M, O, N]
        left = self.kernel(self.hyper, x, x, True) - a.square().sum(1)  # [M, N]
        return (self.mean @ a).mT, (left.unsqueeze(1) + spread).mT.clamp_min(1e-12)

    def joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [M, N, O], and covariance over the rows for each output, [M, O, N, N]."""
        a = whitened(self.kernel, self.hyper, self.points, x)
        spread = self.root.mT @ a.unsqueeze(1)  # [M, O, Z, N]
        left = self.kernel(self.hyper, x, x) - a.mT @ a
        return (self.mean @ a).mT, left.unsqueeze(1) + spread.mT @ spread


def kl(mean: Tensor, root: Tensor, half_logdet: Tensor) -> Tensor:
    """KL[q ‖ p], [M], given Σ_o ½ log |S_o|, which the parametrisation provides."""
    trace = root.square().sum((1, 2, 3)) + mean.square().sum((1, 2))
    return 0.5 * (trace - mean[0].numel()) - half_logdet


def whitened(kernel: Composed, hyper: Tensor, points: Tensor, x: Tensor) -> Tensor:
    """a(x) of every row: [M, Z, N]."""
    root = factor(kernel, hyper, points)
    return torch.linalg.solve_triangular(root, kernel(hyper, points, x), upper=False)


def factor(kernel: Composed, hyper: Tensor, points: Tensor) -> Tensor:
    """L, [M, Z, Z]."""
    return cholesky(jittered(kernel(hyper, points, points)))


def jittered(covariance: Tensor) -> Tensor:
    """The matrix with a slightly larger diagonal, for points that are close to each other."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    more = JITTER * diagonal.mean(-1, keepdim=True).expand_as(diagonal)
    return covariance + torch.diag_embed(more)


def cholesky(matrix: Tensor) -> Tensor:
    """The lower factor; NaN for a member whose matrix has none, which the driver detects."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    return torch.where((info == 0)[..., None, None], lower, torch.nan)


def from_precision(precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, a square root of Λ⁻¹, and Σ_o ½ log |Λ_o⁻¹|, [M], of q(v) in natural parameters
    Λ [M, O, Z, Z] and Λm [M, O, Z]."""
    lower = cholesky(precision)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    root = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    mean = (root @ (root.mT @ shift.unsqueeze(-1))).squeeze(-1)
    return mean, root, -lower.diagonal(dim1=-2, dim2=-1).log().sum((1, 2))


def spread_out(x: Tensor, count: int, way: Tensor, weight: Tensor, rounds: int = 10) -> Tensor:
    """`count` points [M, Z, D] among each member's rows [M, N, D] of nonzero weight.

    The first point is the farthest row along `way` [M, D], and each further one is the row farthest
    from those before it (Gonzalez, 1985). Then the points move to the centres of their
    neighbourhoods (Lloyd, 1982), with rows weighted by [M, N]. If there are as many points as rows,
    they are the rows.
    """
    there = weight > 0
    who = torch.arange(len(x), device=x.device)
    first = (x @ way.unsqueeze(-1)).squeeze(-1).masked_fill(~there, -torch.inf)
    chosen = [x[who, first.argmax(1)]]
    nearest = torch.where(there, torch.inf, -1.0).to(x)
    for _ in range(count - 1):
        nearest = torch.minimum(nearest, (x - chosen[-1].unsqueeze(1)).square().sum(2))
        chosen.append(x[who, nearest.argmax(1)])
    rows = points = torch.stack(chosen, 1)
    for _ in range(rounds):
        owner = torch.cdist(x, points).argmin(2)  # [M, N]
        number = x.new_zeros(len(x), count).scatter_add(1, owner, weight).unsqueeze(2)
        owners = owner.unsqueeze(2).expand_as(x)
        total = torch.zeros_like(points).scatter_add(1, owners, x * weight.unsqueeze(2))
        points = torch.where(number > 0, total / number, points)
    return torch.where((there.sum(1) == count)[:, None, None], rows, points)


def draw(layer: Layer, x: Tensor, noise: Noise, call: int, prior: bool = False) -> Tensor:
    """Functions of one member's layer at rows x [1 or S, N, D], one for each of the S keys of the
    noise: [S, N, O]. With `prior`, they are functions before the data."""
    copies, rows, inputs = x.shape
    flat = x.reshape(1, -1, inputs)  # so that the points are factored once
    phi = features(layer.kernel, layer.hyper, flat)  # [1, S·N, F]
    own = layer.kernel(layer.hyper, flat, flat, True)  # [1, S·N]
    outputs, points = layer.mean.shape[1:]
    weights = noise.normal((phi.shape[2], outputs), 0, 3 * call)  # [S, F, O]
    if prior:
        phi = _with_norm(phi, own)
        return phi.reshape(copies, rows, -1) @ weights
    root = factor(layer.kernel, layer.hyper, layer.points)
    cross = layer.kernel(layer.hyper, layer.points, flat)
    at_points = features(layer.kernel, layer.hyper, layer.points)
    solved = torch.linalg.solve_triangular(root, torch.cat([cross, at_points], 2), upper=False)
    a, known = solved.split([cross.shape[2], at_points.shape[2]], 2)  # [1, Z, S·N], [1, Z, F]
    psi = _with_norm(phi - a.mT @ known, (own - a.square().sum(1)).clamp_min(0.0))
    eps = noise.normal((outputs, points, 1), 0, 3 * call + 1)  # [S, O, Z, 1]
    v = layer.mean + (layer.root @ eps).squeeze(-1)  # [S, O, Z]
    a = a[0].reshape(points, copies, rows).movedim(1, 0)  # [1 or S, Z, N]
    return (v @ a).mT + psi.reshape(copies, rows, -1) @ weights


def _with_norm(phi: Tensor, square: Tensor) -> Tensor:
    """Rows [1, N, F], scaled to these squared lengths [1, N]."""
    return phi * (square / phi.square().sum(2).clamp_min(1e-300)).sqrt().unsqueeze(2)


MOST_POINTS = 100
_SEEN = 2000  # rows that points are chosen from
_ROUNDING = 1e-12  # relative to the size of y: a smaller deviation is a rounding error


def starts(run: Run, inducing: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """For each member, from some of its rows: points [M, Z, D], the mean square of y and its
    standard deviation, [M]; for classes and counts both are 1. Rows of weight 0 are excluded.

    If the targets vary by less than rounding, their size replaces the deviation, so that the noise
    starts at the scale of y in any units.
    """
    seen = sample_rows(run, max(_SEEN, 4 * (inducing or MOST_POINTS)))
    x = seen.x.double().flatten(2) if seen.x.ndim > 2 else seen.x.double().unsqueeze(2)
    weight = torch.ones_like(x[..., 0]) if seen.weight is None else seen.weight
    count = _count(int((weight > 0).sum(1).min()), inducing)
    ways = run.noise("inducing").normal((math.prod(run.rows.x.shape[1:]),)).double()
    points, one = spread_out(x, count, ways, weight), x.new_ones(run.size)
    if not run.likelihood.scales_targets:
        return points, one, one
    y = seen.y.double().reshape(*x.shape[:2], -1)
    share = (weight / weight.sum(1, keepdim=True)).unsqueeze(2)
    away = y - (share * y).sum(1, keepdim=True)
    power, spread = ((share * part.square()).sum(1).mean(1) for part in (y, away))  # [M]
    power = torch.where(power > 0, power, one)
    return points, power, torch.where(spread > _ROUNDING**2 * power, spread, power).sqrt()


def _count(fewest: int, inducing: int | None) -> int:
    if inducing is not None and inducing > fewest:
        raise DataError(
            f"inducing={inducing} points are more than the {fewest} rows that are fitted: give at "
            "most as many, or leave it out"
        )
    return min(inducing or MOST_POINTS, fewest)


PREFIX = "likelihood."  # of entries of the state that belong to the likelihood


@dataclass
class Rows:
    """Rows at the last layer.

    The fields are a [M, Z, B], the marginals of f [M, B, O], Σ E log p [M], the KL of the layers
    before [M], λ times the weights of the rows [M, B, O] if it is not a derivative, and the
    variance of the estimate of Σ E log p over draws [M].
    """

    basis: Tensor
    mean: Tensor
    variance: Tensor
    fit: Tensor
    kl: Tensor
    bend: Tensor | None
    fit_variance: Tensor

    def sites(self, slope: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
        """Σ λ_i a_i a_iᵀ, [M, O, Z, Z], and Σ (g_i + λ_i μ_i) a_i, [M, O, Z]."""
        a, mean = self.basis.detach(), self.mean.detach()
        precision = (a.unsqueeze(1) * bend.mT.unsqueeze(2)) @ a.mT.unsqueeze(1)
        return precision, (slope + bend * mean).mT @ a.mT


def learned_in(state: State) -> State:
    """The likelihood's learned parameters, by their own names."""
    return {k.removeprefix(PREFIX): v for k, v in state.items() if k.startswith(PREFIX)}


def given(run: Run, params: State) -> Theta:
    """The likelihood's parameters of each member, learned or given."""
    return learned_in(params) | {k: v.double() for k, v in run.constants.items()}


def matrix(x: Tensor, lead: int = 1) -> Tensor:
    """[*lead, N] as [*lead, N, 1]."""
    return x.unsqueeze(-1) if x.ndim == lead + 1 else x
