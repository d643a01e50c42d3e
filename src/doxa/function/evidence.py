"""The evidence of a Gaussian process and its gradient, for all members at once.

    B = I + W^½ K W^½ / σ²,    α = B⁻¹u,  u = W^½y/σ
    log p(y) = −½ uᵀα − ½ log |B| − n log σ − (n/2) log 2π
    ∂/∂K = ½ W^½(ααᵀ − B⁻¹)W^½/σ²,    ∂/∂log σ = αᵀα + N − tr B⁻¹ − n

W are the weights of the rows. B has no eigenvalue below 1, so its Cholesky factor needs no jitter.
A row of weight 0, which only pads a short run, changes nothing. Rasmussen & Williams (2006), eq.
5.9. An evaluation takes one Cholesky decomposition, and its gradient one inverse from the factor.
The kernel is processed in blocks of rows, so that only two matrices [N, N] are stored.

**Initial values.** Hyper-parameters start at values that suit the scale of the data, in any units.
Lengthscales start at the root mean square distance between rows, per column by its own spread;
variances share the mean square of y. A row of weight 2 counts as two rows. The evidence has several
maxima, and many along a period: of some starts, the one with the best evidence on a few rows is
used.

**Optimisation.** `quasi_newton` is a stage that maximises the evidence: BFGS for all members, with
one evaluation per step.

    d = H∇L,   θ ← θ + td,   with t made smaller until L gains enough (Armijo)
    H ← (I − ρsyᵀ)H(I − ρysᵀ) + ρssᵀ,   s = td,  y = ∇L_old − ∇L_new,  ρ = 1/sᵀy

Nocedal & Wright (2006), ch. 6. A step tries one θ + td; if it is rejected, the next step tries a
smaller t. The gradient is computed only if some member accepts its step. A member has converged
when the gain predicted by its gradient, ½∇LᵀH∇L, is below 1e-9 nats per row; it then costs nothing.
θ stays between state["low"] and state["high"] if they are present: an element that has reached a
bound and would cross it is held there (Bertsekas, 1982).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.errors import MethodError
from doxa.function.kernels import Composed, KernelFunction
from doxa.method import Clock, Info, Method, Run, Stage, State


class Seen(NamedTuple):
    """x and y of each member, [M, n, ...], in fitted units, and the weights of the rows, [M, n] in
    float64, or None if all are equal. Members with fewer rows repeat their first row at weight 0.
    """

    x: Any
    y: Any
    weight: Tensor | None

    def shares(self, like: Tensor) -> Tensor:
        """The fraction of the total weight that each row has, [M, n], for tensors like this [M, n,
        ...]."""
        weight = like.new_ones(like.shape[:2]) if self.weight is None else self.weight.to(like)
        return weight / weight.sum(1, keepdim=True)


def sample_rows(run: Run, most: int | None = None) -> Seen:
    """All rows of nonzero weight, or this number of them, evenly spaced."""
    weight = run.rows.weight
    own = weight is not None and weight.ndim == 2  # then each member has its own, else each split
    who = range(run.size) if own else range(len(run.rows.rows))
    index, counts = [], []
    for m in who:
        rows = run.rows.rows[run.split_of[m] if own else m]
        if weight is not None:
            each = (weight[m] if own else weight).cpu()[rows.cpu()].double()
            rows, each = rows[(each > 0).to(rows.device)], each[each > 0]
        else:
            each = torch.ones(len(rows), dtype=torch.float64)
        some = evenly(len(rows), len(rows) if most is None else most)
        index.append(rows.cpu()[some])
        counts.append(each[some])
    longest = max(map(len, index))
    if weight is None and all(len(rows) == longest for rows in index):
        found, how = torch.stack(index), None
    else:
        found = torch.stack([torch.cat([r, r[:1].expand(longest - len(r))]) for r in index])
        how = torch.stack([torch.cat([c, c.new_zeros(longest - len(c))]) for c in counts])
    if not own:
        found = found[list(run.split_of)]
        how = None if how is None else how[list(run.split_of)]
    x, y = run.rows.take(found, torch.tensor(run.run_of).unsqueeze(1))
    return Seen(x, y, None if how is None else how.to(run.device))


BLOCK_BYTES = 2 << 20  # of covariances per block


def evenly(rows: int, count: int) -> Tensor:
    """The numbers of at most `count` of so many rows, evenly spaced."""
    return torch.linspace(0, rows - 1, min(count, rows), dtype=torch.float64).long()


class Solved(NamedTuple):
    """Targets and the factor of B for each noise level; L = 1 if all outputs share one."""

    y: Tensor  # [..., L, N, O/L]
    root: Tensor  # W^½/σ [..., L, N]
    factor: Tensor  # the Cholesky factor of B, [..., L, N, N]; NaN if there is none
    solution: Tensor  # α [..., L, N, O/L]


def by_level(y: Tensor, levels: int) -> Tensor:
    """Targets [..., N, O] of each noise level: [..., L, N, O/L]."""
    return y.unsqueeze(-3) if levels == 1 else y.mT.unsqueeze(-1)


def root_weights(log_noise: Tensor, weight: Tensor | None, rows: int) -> Tensor:
    """W^½/σ of each row, [..., L, N], for log σ [..., L] and weights [..., N]."""
    inverse = (-log_noise).exp().unsqueeze(-1)
    if weight is None:
        return inverse.expand(*log_noise.shape, rows)
    return inverse * weight.sqrt().unsqueeze(-2)


def solve(covariance: Tensor, y: Tensor, log_noise: Tensor, weight: Tensor | None) -> Solved:
    """The solution for log σ [..., L], L = 1 or O, of targets y [..., N, O] under K [..., N, N]."""
    root = root_weights(log_noise, weight, y.shape[-2])
    own = by_level(y, log_noise.shape[-1]).expand(*root.shape, -1)
    scaled = root.unsqueeze(-1) * covariance.unsqueeze(-3) * root.unsqueeze(-2)
    return factored(scaled, own, root)


def factored(scaled: Tensor, y: Tensor, root: Tensor) -> Solved:
    """The solution from W^½KW^½/σ² [..., L, N, N], which B overwrites."""
    scaled.diagonal(0, -2, -1).add_(1.0)
    factor, info = torch.linalg.cholesky_ex(scaled)
    del scaled
    factor.diagonal(0, -2, -1).masked_fill_((info != 0).unsqueeze(-1), math.nan)
    return Solved(y, root, factor, torch.cholesky_solve(root.unsqueeze(-1) * y, factor))


def log_evidence(solved: Solved, log_noise: Tensor, n: Tensor | float) -> Tensor:
    """log p(y) [...] in fitted units, for log σ [..., L]; n [...] is the sum of weights."""
    y, root, factor, solution = solved
    misfit = (root.unsqueeze(-1) * y * solution).sum((-3, -2, -1))
    logdet = 2 * factor.diagonal(0, -2, -1).log().sum((-2, -1))
    levels = math.log(2 * math.pi) * log_noise.shape[-1] + 2 * log_noise.sum(-1)
    return -0.5 * (misfit + y.shape[-1] * (logdet + n * levels))


def extended(solved: Solved, blocks: tuple[Tensor, Tensor], y: Tensor, log_noise: Tensor) -> Solved:
    """The solution with further rows of weight 1: their y [B, O], and K [M, N, B], [M, B, B].

    [L 0; C D],   C = (L⁻¹B₁₂)ᵀ,   DDᵀ = B₂₂ − CCᵀ:   n²B in place of (n + B)³
    """
    root = root_weights(log_noise, None, len(y))
    right = root.unsqueeze(-2)
    cross = solved.root.unsqueeze(-1) * blocks[0].unsqueeze(1) * right
    below = torch.linalg.solve_triangular(solved.factor, cross, upper=False).mT
    left = root.unsqueeze(-1) * blocks[1].unsqueeze(1) * right - below @ below.mT
    own = by_level(y, log_noise.shape[-1]).expand(*root.shape, -1)
    corner = factored(left, own, root).factor
    zero = corner.new_zeros(()).expand(below.mT.shape)
    factor = torch.cat([torch.cat([solved.factor, zero], -1), torch.cat([below, corner], -1)], -2)
    whole_y, whole_root = torch.cat([solved.y, own], -2), torch.cat([solved.root, root], -1)
    solution = torch.cholesky_solve(whole_root.unsqueeze(-1) * whole_y, factor)
    return Solved(whole_y, whole_root, factor, solution)


class Hyperprior(NamedTuple):
    """A Gaussian over θ: mean [M, H] and precision [M, H, H]."""

    mean: Tensor
    precision: Tensor

    def value(self, theta: Tensor) -> Tensor:
        """log p(θ) of each member without its constant, [M]."""
        return 0.5 * ((theta - self.mean) * self.gradient(theta)).sum(-1)

    def gradient(self, theta: Tensor) -> Tensor:
        return (self.precision @ (self.mean - theta).unsqueeze(-1)).squeeze(-1)


class Problem(NamedTuple):
    """The data of an evidence: rows [..., N, D], targets [..., N, O], weights, and their sum n.

    log_noise: log σ [..., L] if it is given; None: the last L entries of θ. prior: with one, the
    value is log p(y | θ) + log p(θ).
    """

    kernel: KernelFunction
    x: Tensor
    y: Tensor
    weight: Tensor | None
    n: Tensor
    log_noise: Tensor | None
    prior: Hyperprior | None = None

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """θ as the kernel's part and log σ."""
        size = self.kernel.layout.size
        if self.log_noise is None:
            return theta[..., :size], theta[..., size:]
        return theta[..., :size], self.log_noise.expand(*theta.shape[:-1], -1)

    def blocks(self, members: int) -> list[slice]:
        rows = self.x.shape[-2]
        step = max(1, BLOCK_BYTES // (8 * rows * members))
        return [slice(a, a + step) for a in range(0, rows, step)]

    def members(self, part: Tensor | slice) -> Problem:
        """The problem of some members; shared tensors have no axis of members."""
        own: dict[str, Any] = {
            name: value[part]
            for name, value, alone in (
                ("x", self.x, 2), ("y", self.y, 2), ("weight", self.weight, 1),
                ("n", self.n, 0), ("log_noise", self.log_noise, 1),
            )
            if value is not None and value.ndim > alone
        }  # fmt: skip
        if self.prior is not None:
            own["prior"] = Hyperprior(*(value[part] for value in self.prior))
        return self._replace(**own)

    def thinned(self, count: int) -> Problem:
        """The problem of `count` rows, evenly spaced."""
        index = evenly(self.x.shape[-2], count).to(self.x.device)
        weight = None if self.weight is None else self.weight[..., index]
        n = torch.full_like(self.n, len(index)) if weight is None else weight.sum(-1)
        x, y = self.x[..., index, :], self.y[..., index, :]
        return self._replace(x=x, y=y, weight=weight, n=n)

    @torch.no_grad()
    def solve(self, theta: Tensor) -> Solved:
        """The solution at θ [M, H]."""
        flat, log_noise = self.split(theta)
        rows, (members, levels) = self.x.shape[-2], log_noise.shape
        root = root_weights(log_noise, self.weight, rows)
        scaled = root.new_empty(members, levels, rows, rows)
        for block in self.blocks(members):
            part = self.kernel(flat, self.x[..., block, :], self.x).unsqueeze(-3)
            torch.mul(part, root[..., block].unsqueeze(-1), out=scaled[..., block, :])
        scaled.mul_(root.unsqueeze(-2))
        y = by_level(self.y, levels).expand(*root.shape, -1)
        return factored(scaled, y, root)

    def value(self, theta: Tensor, solved: Solved) -> Tensor:
        """log p(y) at θ [M, H], from the result of `solve` there: [M]."""
        value = log_evidence(solved, self.split(theta)[1], self.n)
        return value if self.prior is None else value + self.prior.value(theta)

    def gradient(self, theta: Tensor, solved: Solved) -> Tensor:
        """The gradient of the evidence at θ [M, H], from the result of `solve` there: [M, H]."""
        flat, _ = self.split(theta)
        y, root, factor, alpha = solved
        outputs, rows = y.shape[-1], y.shape[-2]
        inverse = torch.cholesky_inverse(factor)
        trace = inverse.diagonal(0, -2, -1).sum(-1)  # [M, L]
        fold = inverse.flatten(0, 1)
        fold.baddbmm_(alpha.flatten(0, 1), alpha.flatten(0, 1).mT, beta=-outputs, alpha=1.0)
        weights = inverse.mul_(0.5 * root.unsqueeze(-1)).mul_(root.unsqueeze(-2))
        weights = weights.squeeze(1) if len(trace[0]) == 1 else weights.sum(1)
        grad = torch.zeros_like(flat)
        for block in self.blocks(len(flat)) if flat.shape[1] else ():
            with torch.enable_grad():
                leaf = flat.detach().requires_grad_()
                part = self.kernel(leaf, self.x[..., block, :], self.x)
            grad += torch.autograd.grad(part, leaf, weights[:, block])[0]
        if self.log_noise is None:
            noise = alpha.square().sum((-2, -1)) + outputs * (rows - trace - self.n.unsqueeze(-1))
            grad = torch.cat([grad, noise], -1)
        return grad if self.prior is None else grad + self.prior.gradient(theta)


class Evidence(torch.autograd.Function):
    """log p(y) of each member as a function of θ [M, H], with the gradient above."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, problem: Problem) -> Tensor:
        solved = problem.solve(theta)
        ctx.save_for_backward(problem.gradient(theta, solved))
        return problem.value(theta, solved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grads[0].unsqueeze(-1) * gradient, None


FEW = 256  # rows from which initial values are computed
_SHORTER, _QUIETER = (1.0, 2.0, 4.0, 8.0), (1.0, 3.0)  # divisors of lengthscales and noise
_PERIODS = 128  # frequencies, half a cycle apart over the range of x: periods down to a 64th of it


class Sizes(NamedTuple):
    """Scales of each member's data: the spread of each column of x [..., D]; the mean square of the
    lengths of its rows, the mean square of y, and the standard deviation of y (1 if it is 0), all
    [..., 1]."""

    spread: Tensor
    length: Tensor
    power: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weight: Tensor | None) -> Sizes:
        """The scales of rows x [..., n, D] and targets y [..., n, O]."""
        w = torch.ones_like(x[..., 0]) if weight is None else weight
        w = (w / w.sum(-1, keepdim=True)).unsqueeze(-1)
        spread, deviation = (
            (w * (t - (w * t).sum(-2, keepdim=True)).square()).sum(-2) for t in (x, y)
        )
        length = (w * x.square()).sum((-2, -1)).unsqueeze(-1)
        power = (w * y.square()).sum(-2).mean(-1, keepdim=True)
        return cls(spread.sqrt(), length, power, _or_one(deviation.mean(-1, keepdim=True).sqrt()))


def kernel_start(
    kernel: Composed,
    x: Tensor,
    sizes: Sizes,
    lengthscale: Tensor | None,
    variance: Tensor | None,
    counts: Tensor | None = None,
) -> Tensor:
    """Initial logarithms for a few rows x [..., n, D] of data with these scales: [..., H]. Given
    values, [] or [..., 1], are used. counts: which of the rows exist, [..., n]."""
    own = sizes.spread
    some = own > 1e-12 * own.amax(-1, keepdim=True)
    spread = torch.where(some, own, torch.ones_like(own))
    varied = _or_one(some.double().sum(-1, keepdim=True))
    whole = _or_one(own.square().sum(-1, keepdim=True)).sqrt()
    values, layout, lead = {}, kernel.layout, x.shape[:-2]
    for entry in layout.entries:
        name, columns = entry.name.rpartition(".")[2], entry.shape[1]
        found: Tensor | float
        if name == "lengthscale" and entry.name.startswith("periodic"):
            found = 1.0 if lengthscale is None else lengthscale  # of a sine: no units
        elif name == "lengthscale":
            found = math.sqrt(2) * (spread * varied.sqrt() if columns > 1 else whole)
            found = found if lengthscale is None else lengthscale
        elif name == "period":
            found = 8.0 * (spread if columns > 1 else whole)
        else:  # alpha; a variance, set below; an offset
            found = _or_one(sizes.length) if name == "offset" else 1.0
        value = torch.as_tensor(found, dtype=x.dtype, device=x.device).expand(*lead, columns).log()
        values[entry.name] = value.unsqueeze(-2)
    flat = layout.flatten(values)
    terms = [s.start for name, s in layout.slices.items() if name.endswith(".variance")]
    power = _or_one(sizes.power).squeeze(-1) / len(terms)
    there = torch.ones_like(x[..., 0]) if counts is None else counts.to(x)
    for term in terms:
        alone = flat.clone()
        alone[..., terms] = -torch.inf
        alone[..., term] = 0.0
        if kernel.text == "linear":
            mean = sizes.length.squeeze(-1)
        else:
            mean = (there * kernel(alone, x, x, True)).sum(-1) / there.sum(-1)
        size = _or_one(mean)  # of a term without its variance
        first = power / size
        if variance is not None:
            first = variance.to(x).expand(*lead, 1).squeeze(-1)
        flat[..., term] = first.log()
    return flat


def first_value(run: Run, method: Method, field: str) -> Tensor | None:
    """A given initial value for each member, [M, 1] in float64; None if it is not given."""
    if field in run.hyper:
        return run.hyper[field].double().unsqueeze(1)
    value = getattr(method, field)
    if value is None:
        return None
    return torch.full((run.size, 1), value, dtype=torch.float64, device=run.device)


def best_start(kernel: Composed, problem: Problem, theta: Tensor, scales: bool) -> Tensor:
    """θ [M, H] with the best divisors: the periods, then the lengthscales (if `scales`) and the
    noise are divided by the numbers for which the evidence of the member's problem is largest."""
    layout, size = kernel.layout, kernel.layout.size
    ends = [(name.rpartition(".")[2], s) for name, s in layout.slices.items()]
    periods, lengths = ([s for end, s in ends if end == w] for w in ("period", "lengthscale"))
    if periods:
        tried = theta.repeat(_PERIODS, 1, 1)
        less = torch.arange(1, _PERIODS + 1, dtype=theta.dtype, device=theta.device).log()
        for own in periods:
            tried[..., own] -= less[:, None, None]
        theta = _best(problem, tried)
    less = torch.cartesian_prod(
        *(torch.tensor(each).double().log() for each in (_SHORTER, _QUIETER))
    ).to(theta.device)
    tried = theta.repeat(len(less), 1, 1)
    for own in lengths if scales else ():
        tried[..., own] -= less[:, None, :1]
    tried[..., size:] -= less[:, None, 1:]
    return _best(problem, tried)


def _best(problem: Problem, tried: Tensor) -> Tensor:
    """For each member, the best θ of [T, M, H]: [M, H]. All members are evaluated at once, one of T
    at a time."""
    each = [problem.value(theta, problem.solve(theta)) for theta in tried]
    best = torch.stack(each).nan_to_num(-torch.inf).argmax(0)
    return tried[best, torch.arange(tried.shape[1], device=tried.device)]


def check_positive(kernel: KernelFunction, x: Tensor) -> None:
    """Check that a user's kernel is one: symmetric, and without negative eigenvalues at the rows of
    each member, [M, n, D]."""
    found = kernel(kernel.start().to(x).expand(len(x), -1), x, x).detach()
    size = float(found.diagonal(0, -2, -1).abs().max())
    if not bool(torch.isfinite(found).all()):
        raise MethodError("the kernel gives values that are not finite at the training rows")
    if float((found - found.mT).abs().max()) > 1e-8 * size:
        raise MethodError("the kernel is not a covariance: k(a, b) differs from k(b, a)")
    least = float(torch.linalg.eigvalsh(found).min())
    if least < -1e-6 * size:
        raise MethodError(
            f"the kernel is not positive definite: the covariance of {x.shape[1]} training rows "
            f"has an eigenvalue of {least:.3g}, and a variance cannot be negative; sums and "
            "products of kernels are kernels, differences are not"
        )


def _or_one(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, torch.ones_like(value))


_SUFFICIENT = 1e-4  # fraction of the gain predicted by the gradient
_ARRIVED = 1e-9  # the predicted gain, in nats per row
_SMALLEST = 2.0**-12  # of t
_FURTHEST = 2.0  # a step of a logarithm
_GROUP_BYTES = 256 << 20  # of matrices [N, N] at a time
_NAMES = (
    "theta",
    "value",
    "grad",
    "inverse",
    "direction",
    "share",
    "guess",
    "arrived",
    "low",
    "high",
)
_KEYS = ("theta", *(f"ascent.{name}" for name in _NAMES[1:]))

Part = dict[str, Tensor]


def quasi_newton(
    problem_of: Callable[[Run, Batch], Problem], steps: int, name: str, rows: int | None = None
) -> Stage:
    """Ascend the evidence from state["theta"], of all rows, or of `rows` of them, evenly spaced."""

    def enter(run: Run, state: State) -> State:
        theta = state["theta"]
        one, eye = torch.ones_like(theta[:, 0]), torch.eye(theta.shape[1], device=theta.device)
        eye = eye.to(theta).expand(run.size, -1, -1).clone()
        start = dict(zip(_KEYS, (
            theta, -torch.inf * one, torch.zeros_like(theta), eye, torch.zeros_like(theta), one,
            one, 0 * one, state.get("low", theta - torch.inf), state.get("high", theta + torch.inf),
        ), strict=True))  # fmt: skip
        own = run.n.to(theta) if rows is None else one * rows
        if "ascent.inverse" in state:  # from fewer rows, so with less curvature
            less = state["ascent.rows"] / own
            start["ascent.inverse"] = state["ascent.inverse"] * less[:, None, None]
            start["ascent.guess"] = state["ascent.guess"]
        return state | start | {"ascent.rows": own}

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        problem = problem_of(run, batch)
        if rows is not None:
            problem = problem.thinned(rows)
        whole = {name: state[key].clone() for name, key in zip(_NAMES, _KEYS, strict=True)}
        still = (whole["arrived"] == 0).nonzero()[:, 0]
        levels = 1 if problem.log_noise is None else problem.log_noise.shape[-1]
        size = max(1, _GROUP_BYTES // (16 * levels * problem.x.shape[-2] ** 2))
        for part in still.split(size) if len(still) else ():
            at = {name: value[part] for name, value in whole.items()}
            there = advanced(problem.members(part), at)
            for key, value in there.items():
                whole[key][part] = value
        found = {key: whole[name] for name, key in zip(_NAMES, _KEYS, strict=True)}
        return state | found, {"loss": whole["value"] / -problem.n}

    return Stage(name, step, steps, "all", enter=enter, capturable=False)


def advanced(problem: Problem, at: Part) -> Part:
    """One evaluation for each member, and the state after it."""
    theta, value, grad, share = (at[name] for name in ("theta", "value", "grad", "share"))
    first = torch.isinf(value)
    slope = (at["direction"] * grad).sum(1)
    tried = (theta + share[:, None] * at["direction"]).clamp(at["low"], at["high"])
    solved = problem.solve(tried)
    reached = problem.value(tried, solved)
    taken = reached >= value + _SUFFICIENT * share * slope
    there = problem.gradient(tried, solved) if bool(taken.any()) else grad
    taken = taken & torch.isfinite(there).all(1)
    lost = first & ~taken  # no evidence at the start
    s, y = tried - theta, grad - there
    inverse, guess = _curvature(at, s, y, taken & ~first)
    steep = there.norm(dim=1).clamp_min(1.0)
    inverse = torch.where(
        (first & (guess > 0))[:, None, None], inverse / steep[:, None, None], inverse
    )
    new_theta, new_grad = (
        torch.where(taken[:, None], a, b) for a, b in ((tried, theta), (there, grad))
    )
    # not taken: the top of the parabola through both values, if that is not too near either
    promised = (share * slope).clamp_min(1e-300)
    bend = 0.5 * promised / (promised - (reached - value)).clamp_min(1e-300)
    smaller = share * bend.nan_to_num(0.1).clamp(0.1, 0.5)
    stuck = ~taken & (smaller < _SMALLEST)  # restart with the gradient
    eye = torch.eye(theta.shape[1], dtype=theta.dtype, device=theta.device)
    gentle = (100 * new_grad.norm(dim=1)).clamp_min(1e-300)[:, None, None]
    inverse = torch.where(stuck[:, None, None], eye / gentle, inverse)
    below, above = new_theta <= at["low"], new_theta >= at["high"]
    free = (~((below & (new_grad < 0)) | (above & (new_grad > 0)))).to(theta)
    full = free * (inverse @ (free * new_grad).unsqueeze(-1)).squeeze(-1)
    promise = 0.5 * (full * new_grad).sum(1)
    shorter = (_FURTHEST / full.abs().amax(1).clamp_min(1e-300)).clamp_max(1.0)
    over = (promise < _ARRIVED * problem.n) & taken | (stuck & (at["guess"] > 0)) | lost
    return {
        "theta": new_theta,
        "value": torch.where(taken, reached, value),
        "grad": new_grad,
        "inverse": inverse,
        "direction": full * shorter[:, None],
        "share": torch.where(taken | stuck, torch.ones_like(share), smaller),
        "guess": torch.where(stuck, torch.ones_like(guess), guess),
        "arrived": over.to(share),
        "low": at["low"],
        "high": at["high"],
    }


def _curvature(at: Part, s: Tensor, y: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """H after a step, and whether it is still the initial guess."""
    inner = (s * y).sum(1)
    useful = moved & (inner > 1e-12 * s.norm(dim=1) * y.norm(dim=1))
    inner = torch.where(useful, inner, torch.ones_like(inner))
    eye = torch.eye(s.shape[1], dtype=s.dtype, device=s.device)
    size = inner / y.square().sum(1).clamp_min(1e-300)  # of the curvature, before its shape
    guessed = (at["guess"] > 0)[:, None, None]
    inverse = torch.where(guessed, size[:, None, None] * eye, at["inverse"])
    left = eye - s.unsqueeze(2) * y.unsqueeze(1) / inner[:, None, None]
    inverse = left @ inverse @ left.mT + s.unsqueeze(2) * s.unsqueeze(1) / inner[:, None, None]
    kept = torch.where(useful[:, None, None], inverse, at["inverse"])
    return kept, torch.where(useful, torch.zeros_like(inner), at["guess"])
