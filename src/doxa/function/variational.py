"""Shared by sparse and deep processes: stochastic variational inference of the last layer.

    ELBO = Σ_i E_q log p(y_i | f(x_i)) − Σ_layers KL[q(u) ‖ p(u)]

Hensman et al. (2013, 2015). q(v) of the last layer moves by natural gradients (Hensman et al. 2013;
Salimbeni et al. 2018): with λ_i and g_i as below and a_i of `inducing.py`,

    Λ  ← (1 − γ)Λ  + γ (I + (n/B) Σ λ_i a_i a_iᵀ)
    Λm ← (1 − γ)Λm + γ (n/B) Σ (g_i + λ_i μ_i) a_i

Kernels, points, the parameters of the likelihood and those of inner layers ascend the ELBO by the
optimiser of `fit`. γ follows the schedule of the learning rate.

E_q log p(y | f) of each row under Gaussian marginals:

    Gaussian noise          log p(y | μ) − v/2σ²
    one latent per target   Σ_q w_q log p(y | μ + √(2v) t_q)        (Gauss–Hermite)
    several (classes)       the mean over draws f = μ + √v ε

By Bonnet's and Price's theorems ∂/∂μ is E ∂log p/∂f and −2 ∂/∂v is λ = −E ∂²log p/∂f²: a row acts
on q like a Gaussian observation of precision λ (Khan & Lin, 2017). Negative values of λ, which
occur only at outliers of likelihoods with heavy tails, are set to 0. With several latents, λ is the
mean of the likelihood's curvature, which is exact for classes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from doxa.data import Batch, batch_rows
from doxa.errors import DataError, MethodError, ModelError
from doxa.function.evidence import Sizes, first_value, kernel_start
from doxa.function.inducing import (
    JITTER,
    MOST_POINTS,
    PREFIX,
    Layer,
    Rows,
    from_precision,
    given,
    kl,
    learned_in,
    matrix,
    starts,
    whitened,
)
from doxa.function.kernels import MOST_COLUMNS, Composed
from doxa.likelihoods import Heads, Likelihood, Theta
from doxa.method import Clock, Info, Method, Run, Stage, State
from doxa.method.method import Workload, between, flag, plain, positive, rules, whole
from doxa.posterior import Posterior, Status

_NODES = 20
Shape = tuple[int, ...]


@lru_cache(8)
@torch.inference_mode(False)  # the result is cached, and later callers may differentiate
def _hermite(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Nodes and weights for a standard normal, cached so that a recorded step copies none to a
    GPU."""
    at, weight = np.polynomial.hermite.hermgauss(_NODES)
    both = math.sqrt(2.0) * at, weight / math.sqrt(math.pi)
    nodes, weights = (torch.from_numpy(part).float().to(device, dtype) for part in both)
    return nodes, weights


def several_latents(likelihood: Likelihood, output: Shape) -> bool:
    """Whether a target depends on several outputs; noise is then drawn for it."""
    if isinstance(likelihood, Heads):
        raise MethodError("a sparse process has one likelihood, not several heads: fit each alone")
    return likelihood.event(output) != tuple(output)


def expected_log_prob(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor, theta: Theta,
    output: Shape, noise: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """E log p(y_i | f_i), [M, B], for marginals [M, B, O]; and λ [M, B, O] where it is not found
    as a derivative. `noise` [M, B, K, O] are the draws for several latents."""
    shaped = (*mean.shape[:2], *output)
    if likelihood.integrates_normal:
        at = mean.reshape(shaped)
        bend = likelihood.curvature(at, theta, 1).diagonal(dim1=-2, dim2=-1)  # constant in f
        return likelihood.log_prob(at, y, theta, 1) - 0.5 * (variance * bend).sum(2), None
    std = variance.sqrt()
    if noise is None:
        at, weights = _hermite(mean.device, mean.dtype)
        f = mean + at[:, None, None, None] * std
    else:
        f = mean + noise.movedim(2, 0) * std
        weights = mean.new_full((len(f),), 1.0 / len(f))
    many = {k: v.expand(len(f), *v.shape) for k, v in theta.items()}
    f = f.reshape(-1, *shaped)
    each = torch.einsum("k,kmb->mb", weights, likelihood.log_prob(f, y, many, 2))
    if noise is None:
        return each, None
    with torch.no_grad():
        bend = likelihood.curvature(f, many, 2, y).diagonal(dim1=-2, dim2=-1).mean(0)
    return each, bend


_MATRICES = 24.0  # copies of q(v) and of a batch at the peak of a step, as measured
_MOST_LOST = 0.5  # nats per row, to rounding
_REPLICATES = 8  # draws per row of a bound that is estimated


@dataclass(frozen=True)
class VariationalProcess(Method):
    """The settings of all processes with inducing points.

    Parameters
    ----------
    kernel : str
        A name of `function/kernels.py` ("rbf", "matern52", "periodic", "linear", …), or sums and
        products of names, such as "rbf * periodic + linear".
    inducing : int, optional
        Number of inducing points. None: 100, or the number of rows if that is smaller.
    ard : bool, optional
        One lengthscale (and period) per column of x. None: if there are at most 50 columns.
    learn_kernel : bool
        Fit the hyper-parameters of the kernel and learned noise. False keeps the initial values.
    learn_inducing : bool
        Move the inducing points. False keeps the rows that were chosen first.
    lengthscale, variance : float, optional
        Initial values, in fitted units. None: the distance between inducing points, and the mean
        square of y (1 for classes and counts).
    natural : float
        γ, the step of natural gradients.
    samples : int
        Draws per row, if a likelihood has several outputs per target.
    """

    default_steps: ClassVar[int] = 1000
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    default_rate: ClassVar[float] = 2e-2
    default_batch: ClassVar[int] = 256
    needs_network: ClassVar[bool] = False
    shares: ClassVar[str] = "none"
    renamed: ClassVar[Mapping[str, str]] = {
        "fit_hyper": "learn_kernel",
        "fit_points": "learn_inducing",
    }

    kernel: str = plain("rbf", str, "a kernel's name, or sums and products of names")
    inducing: int | None = whole(None, least=1)
    ard: bool | None = flag(None)
    learn_kernel: bool = flag(True)
    learn_inducing: bool = flag(True)
    lengthscale: float | None = positive(None, per_run=True)
    variance: float | None = positive(None, per_run=True)
    natural: float = between(0.1, 0, 1, "(]")
    samples: int = whole(8, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            Composed(self.kernel)
        except MethodError as error:
            rule = rules(self)["kernel"].words("kernel")
            raise MethodError(f"kernel must be {rule}, not {self.kernel!r}: {error}") from error

    @abstractmethod
    def init_inner(self, points: Tensor) -> tuple[State, Tensor]:
        """The state of the layers before the last, and the points [M, Z, D] after these layers."""

    @abstractmethod
    def inner(self, run: Run, params: State, x: Tensor, clock: Clock) -> tuple[Tensor, Tensor, int]:
        """The inputs of the last layer, [M, B·K, W], for x [M, B, D]; the KL of the layers before,
        [M]; and K."""

    def moving(self, state: State) -> tuple[str, ...]:
        """The names that the optimiser trains."""
        names = [k for k in state if k.startswith(("inner.", PREFIX)) or k in ("hyper", "points")]
        kept = ["project", *(() if self.learn_inducing else ("points",))]
        kept += [] if self.learn_kernel else ["hyper", *(k for k in names if k.startswith(PREFIX))]
        return tuple(name for name in names if not name.endswith(tuple(kept)))

    def init(self, run: Run) -> State:
        self._check(run)
        points, power, spread = starts(run, self.inducing)
        inner, points = self.init_inner(points)
        outputs, count = math.prod(run.output), points.shape[1]
        eye = torch.eye(count, dtype=points.dtype, device=points.device)
        length, variance = (first_value(run, self, name) for name in ("lengthscale", "variance"))
        state = {
            "hyper": self.first_hyper(points, power, length, variance),
            "points": points,
            "precision": eye.expand(run.size, outputs, -1, -1).clone(),
            "shift": points.new_zeros(run.size, outputs, count),
        }  # fmt: skip
        for name, value in run.likelihood.parameters(run.output).items():
            own = value.to(points).expand(run.size, *value.shape).clone()
            if name in run.likelihood.log_scales:
                own += (0.3 * spread).log().reshape(-1, *(1,) * value.ndim)
            state[PREFIX + name] = own
        return inner | state

    def planned_bytes(self, work: Workload) -> int:
        """Bytes of matrices [Z, Z] per output, and [Z, B] of a batch, in float64."""
        points = min(self.inducing or MOST_POINTS, work.rows)
        each = work.outputs * points * (points + work.batch)
        return int(_MATRICES * 8 * work.members * self.depth * each)

    @property
    def depth(self) -> int:
        """The number of layers whose matrices are stored, weighted by their outputs."""
        return 1

    def _check(self, run: Run) -> None:
        if run.problem.model is not None:
            raise ModelError(
                f"{self.name} brings its own functions and would not use the network: pass None "
                f"in its place; a network's features can be given to {self.name} as x"
            )
        if not isinstance(run.rows.x, Tensor) or run.rows.x.ndim > 2:
            raise DataError(f"{self.name} needs x as one array [N, D]")
        several_latents(run.likelihood, run.output)

    def first_hyper(
        self, points: Tensor, power: Tensor, length: Tensor | None, variance: Tensor | None
    ) -> Tensor:
        """Initial logarithms of the kernel [M, H] for points [M, Z, D] and a mean square of f
        [M]."""
        kernel = self.covariance(points.shape[2])
        y = power.sqrt()[:, None, None].expand(-1, points.shape[1], 1)
        return kernel_start(kernel, points, Sizes.of(points, y, None), length, variance)

    def covariance(self, inputs: int) -> Composed:
        each = inputs <= MOST_COLUMNS if self.ard is None else self.ard
        return Composed(self.kernel, inputs if each else 1)

    def reads_inputs(self, run: Run) -> bool:
        return True

    def stages(self, run: Run) -> Iterable[Stage]:
        recorded = run.device.type != "cpu"  # where `fit` records a graph
        yield Stage("bound", self._step, run.steps, enter=self._enter, capturable=recorded)
        yield Stage("last pass", self._last, 0, "pass", enter=self._enter_last, capturable=False)

    def _enter(self, run: Run, state: State) -> State:
        moving = {name: state[name] for name in self.moving(state)}
        return state | run.settings.optimizer.init(moving)

    def _step(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        mean, root, half_logdet = from_precision(state["precision"], state["shift"])
        names = self.moving(state)
        with torch.enable_grad():
            leaves = {name: state[name].detach().requires_grad_() for name in names}
            at = self.at(run, {**state, **leaves}, batch, clock, mean, root)
            value = at.fit - at.kl
            wanted = [at.mean, at.variance, *leaves.values()]
            slope, width, *found = torch.autograd.grad(value.sum(), wanted, allow_unused=True)
        with torch.no_grad():
            bend = -2.0 * width if at.bend is None else at.bend
            precision, shift = at.sites(slope, bend.clamp_min(0.0))
            precision.diagonal(dim1=-2, dim2=-1).add_(1.0)
            gamma = self.natural * self._share(run, clock).reshape(-1, 1, 1)
            new = {
                "precision": torch.lerp(state["precision"], precision, gamma.unsqueeze(-1)),
                "shift": torch.lerp(state["shift"], shift, gamma),
            }
            grads = {
                name: run.descent(torch.zeros_like(leaves[name]) if grad is None else grad)
                for name, grad in zip(names, found, strict=True)
            }
            params = {name: state[name] for name in names}
            if names:
                optimizer = run.settings.optimizer
                new |= optimizer.update(params, grads, state, clock.rate, clock.t, clock.owned)
            bound = value.detach() - kl(mean, root, half_logdet)
        return {**state, **new}, {"loss": bound * run.per_example}

    def _share(self, run: Run, clock: Clock) -> Tensor:
        """The learning rate as a fraction of its first value, [M]."""
        first = run.hyper.get("lr", run.settings.rate)
        return (clock.rate.flatten() / first).to(torch.float64).expand(run.size)

    def at(
        self, run: Run, params: State, batch: Batch, clock: Clock, mean: Tensor, root: Tensor,
        replicates: int = 1,
    ) -> Rows:  # fmt: skip
        """A batch at the last layer, with `replicates` draws of each row."""
        x = matrix(batch.x, lead=0 if batch.shared else 1).double()
        x = x.expand(run.size, *x.shape) if batch.shared else x
        x = x if replicates == 1 else x.repeat_interleave(replicates, 1)
        h, before, copies = self.inner(run, params, x, clock)
        copies *= replicates
        kernel = self.covariance(h.shape[2])
        layer = Layer(kernel, params["hyper"], params["points"], mean, root)
        basis = whitened(kernel, layer.hyper, layer.points, h)
        f, variance = layer.marginals(h, basis)
        if torch.is_grad_enabled() and not f.requires_grad:  # nothing before it is being fitted
            f, variance = f.requires_grad_(), variance.requires_grad_()
        output, noise = run.output, None
        if several_latents(run.likelihood, output):
            noise = clock.rows("normal", batch_rows(batch) * copies, self.samples, f.shape[2])
            noise = noise.double()
        y = batch.y.double() if batch.y.is_floating_point() else batch.y
        axis = 0 if batch.shared else 1
        y = y if copies == 1 else y.repeat_interleave(copies, axis)
        each, bend = expected_log_prob(
            run.likelihood, f, variance, y, given(run, params), output, noise
        )
        weight = (batch.scale / copies).double().unsqueeze(1).expand(-1, batch_rows(batch))
        if batch.weight is not None:
            weight = weight * batch.weight
        weight = weight.repeat_interleave(copies, 1)  # [M, B·K]
        if bend is not None:
            bend = bend * weight.unsqueeze(2)
        terms = each * weight
        return Rows(basis, f, variance, terms.sum(1), before, bend, _error(terms, copies))

    def _enter_last(self, run: Run, state: State) -> State:
        zero = state["shift"].new_zeros(run.size)
        return state | {"fit": zero, "fit variance": zero, "inner kl": zero}

    def _last(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """E_q log p(y | f) of all rows, for the bound: a pass over the data."""
        mean, root, _ = from_precision(state["precision"], state["shift"])
        replicates = _REPLICATES if self.random_bound(run) else 1
        with torch.no_grad():
            at = self.at(run, state, batch, clock, mean, root, replicates)
        variance = state["fit variance"] + at.fit_variance
        new = {"fit": state["fit"] + at.fit, "fit variance": variance, "inner kl": at.kl}
        return {**state, **new}, {}

    def bound(self, run: Run, state: State) -> float | None:
        """The ELBO in units of y, after the last pass; the mean over members."""
        if run.tempered:
            return None
        mean, root, half_logdet = from_precision(state["precision"], state["shift"])
        each = state["fit"] - state["inner kl"] - kl(mean, root, half_logdet)
        return float((each + run.units_log_jacobian()).mean())

    def posterior_parts(self, run: Run, state: State) -> dict[str, Any]:
        """The arguments of the posterior of one run, by name."""
        mean, root, _ = from_precision(state["precision"], state["shift"])
        return run.common(self) | {
            "hyper": state["hyper"], "points": state["points"], "mean": mean, "root": root,
            "output": run.output, "learned": learned_in(state), "reference": run.n[:1],
        }  # fmt: skip

    def recorded(self, run: Run, state: State, posterior: Posterior) -> Posterior:
        """The posterior with its bound, the standard error of the bound, and the fitted kernel."""
        posterior.elbo = self.bound(run, state)
        if posterior.elbo is not None and self.random_bound(run):
            error = state["fit variance"].sum().sqrt() / run.size
            posterior.record.diagnostics["elbo_error"] = float(error)
        kernel = self.covariance(state["points"].shape[2])
        posterior.record.diagnostics["kernel"] = kernel.named(state["hyper"])
        lost = self._lost_to_rounding(run, state, kernel)
        if lost > _MOST_LOST:
            reason = (
                f"rounding costs {lost:.2g} nats per row: the noise is too small beside the size "
                "of y for the kernel's matrix; pass standardize=True, or subtract the mean of y"
            )
            posterior.record.status = Status("degenerate", reason)
        return posterior

    def random_bound(self, run: Run) -> bool:
        """Whether the bound is an estimate by draws."""
        return several_latents(run.likelihood, run.output)

    def _lost_to_rounding(self, run: Run, state: State, kernel: Composed) -> float:
        """The largest loss of a member's bound, in nats per row, that is caused by the variance
        that `jittered` adds at the inducing points: JITTER k(z, z)/2σ²; 0 unless the noise is
        Gaussian."""
        if not run.likelihood.integrates_normal:
            return 0.0
        points = state["points"]
        f = points.new_zeros(run.size, 1, *run.output)
        precision = run.likelihood.curvature(f, given(run, state), 1)  # [M, 1, O, O]
        precision = precision.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)
        added = JITTER * kernel(state["hyper"], points, points, True).mean(1)  # [M]
        return float((0.5 * added * precision).max())


def _error(terms: Tensor, copies: int) -> Tensor:
    """The variance of Σ terms [M, B·K], [M], from K draws per row; 0 if K is 1."""
    if copies == 1:
        return terms.new_zeros(len(terms))
    return copies * terms.unflatten(1, (-1, copies)).var(2).sum(1)
