"""Exact Gaussian-process regression.

    f ~ GP(0, k),  y = f(x) + ε,  ε ~ N(0, σ²)
    f* | y ~ N(k*ᵀ(K + σ²I)⁻¹y,  k** − k*ᵀ(K + σ²I)⁻¹k*)
    log p(y) = −½ yᵀ(K + σ²I)⁻¹y − ½ log |K + σ²I| − (n/2) log 2π

Rasmussen & Williams (2006), Algorithm 2.1. Hyper-parameters of the kernel and the noise are found
by type-II maximum likelihood, as logarithms, with BFGS on log p(y). If there are many rows, some of
them are fitted first. With fewer than 50 rows the evidence alone is unreliable: many
hyper-parameters explain a few rows without noise. There log p(y | θ) + log p(θ) is maximised, with
log-normal priors of width 1 around initial values; the lengthscales of columns share a factor, and
differ by a width of 0.3. All computations are in float64, for data of any type. Several outputs
share the kernel. Members after the first start from perturbed hyper-parameters; all are fitted at
once. An evaluation costs n³ and two matrices of n²: up to about 10,000 rows. `announce` reports the
memory that is needed before it is allocated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data import Batch, free_memory
from doxa.errors import DataError, MemoryBudgetError, MethodError, ModelError
from doxa.exact.targets import check_gaussian, event_of, given_noise
from doxa.function.evidence import (
    FEW,
    Evidence,
    Hyperprior,
    Problem,
    Sizes,
    best_start,
    check_positive,
    evenly,
    first_value,
    kernel_start,
    quasi_newton,
    sample_rows,
)
from doxa.function.kernels import Composed, KernelFunction, KernelSpec, function_of
from doxa.function.process import GPPosterior, matrix, shared_level
from doxa.method import Clock, Method, Run, Stage, State, optimise
from doxa.method.method import Workload, flag, plain, positive, whole
from doxa.posterior import Posterior, Status

log = logging.getLogger("doxa")

WORKING = 2  # matrices [N, N] that an evaluation of the evidence holds
_SLACK = 256 << 20  # blocks of covariances, and what they leave for the backward pass


def exact_bytes(rows: int, matrices: int) -> int:
    """Bytes of `matrices` factors [N, N] in float64 and of the work on them."""
    return 8 * rows**2 * (matrices + WORKING) + _SLACK


def announce(rows: int, matrices: int, name: str, device: torch.device) -> int:
    """Log the bytes of `matrices` factors [N, N] and of the work on them; raise an error if they
    are not available."""
    need = exact_bytes(rows, matrices)
    log.info("%s: %s rows take %.3g GiB (%s bytes)", name, rows, need / 2**30, need)
    free = free_memory(device)
    if need > free:
        raise MemoryBudgetError(
            f"{name} holds {matrices + WORKING} matrices of {rows} × {rows} rows: "
            f"{need / 2**30:.3g} GiB ({need} bytes), and {free / 2**30:.3g} GiB are free; "
            'fit fewer rows, or use "sparse-gp", which holds none of them'
        )
    return need


_KERNELS = "a kernel's name, sums and products of names, or a gpytorch kernel"
_NOISE, _LEAST = 0.3, 1e-3  # where learned noise starts, and ends: shares of y's deviation
_WIDE = math.log(1e5)  # how far other hyper-parameters go from their start
_FEW_ROWS = 50  # effective number of rows; fewer have a prior over hyper-parameters
_PRIOR_NOISE, _PRIOR_WIDTH, _APART = 0.5, 1.0, 0.3  # its centre of the noise; its widths, of logs
_SKETCH = 500  # rows that are fitted first where there are many, then three times as many


@store.register("gp")
@dataclass(frozen=True)
class GP(Method):
    """Exact GP regression.

    Parameters
    ----------
    kernel : str or gpytorch Kernel
        "rbf", "matern12", "matern32", "matern52" (also "matern"), "rq", "periodic", "cosine",
        "linear", "polynomial2", "polynomial3", "relu1" to "relu3", "constant", sums and products of
        them such as "rbf * periodic + linear" (`function/kernels.py`), or a gpytorch kernel, which
        starts from its own values and needs a registered builder to be saved.
    noise : float, optional
        Standard deviation of the noise in units of y. None: that of the likelihood, or fitted.
    learn_kernel : bool
        Fit the hyper-parameters of the kernel and the noise. False keeps the initial values.
    lengthscale, variance : float, optional
        Initial values for a named kernel, in fitted units. None: the root mean square distance
        between rows, and the mean square of y.
    ard : bool, optional
        One lengthscale (and period) per column of x. None: if there are at most 50 columns.
    hyperprior : bool, optional
        A prior over hyper-parameters. None: with fewer than 50 rows, and a named kernel.
    refine : int
        Maximal number of evaluations of the evidence that bring the hyper-parameters to its
        maximum. `fit` can run steps of gradient ascent before them: none by default.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(0, 6, 30).double()[:, None]
    >>> posterior = doxa.fit(None, (x, x.sin()), doxa.GP(noise=0.01), steps=50)
    >>> bool((posterior.predict(x).mean - x.sin()).abs().max() < 0.01)
    True
    """

    sums_over_rows: ClassVar[bool] = False
    name: ClassVar[str] = "gp"
    renamed: ClassVar[Mapping[str, str]] = {"fit_hyper": "learn_kernel"}
    default_steps: ClassVar[int] = 0
    default_rate: ClassVar[float] = 0.1
    needs_network: ClassVar[bool] = False
    shares: ClassVar[str] = "none"
    regression_only: ClassVar[bool] = True

    kernel: str | KernelSpec | nn.Module = plain("rbf", (str, nn.Module, KernelSpec), _KERNELS)
    noise: float | None = positive(None, per_run=True)
    learn_kernel: bool = flag(True)
    lengthscale: float | None = positive(None, per_run=True)
    variance: float | None = positive(None, per_run=True)
    ard: bool | None = flag(None)
    hyperprior: bool | None = flag(None)
    refine: int = whole(100, least=0)

    def __post_init__(self) -> None:
        if isinstance(self.kernel, nn.Module):
            object.__setattr__(self, "kernel", KernelSpec.of(self.kernel) or self.kernel)
        super().__post_init__()
        known = hasattr(self.kernel, "named_parameters_and_constraints")
        if isinstance(self.kernel, nn.Module) and not known:
            raise MethodError(f"kernel must be {_KERNELS}, not {type(self.kernel).__name__}")
        if isinstance(self.kernel, str):
            try:
                Composed(self.kernel)
            except MethodError as error:
                message = f"kernel must be {_KERNELS}, not {self.kernel!r}: {error}"
                raise MethodError(message) from error
        elif self.lengthscale is not None or self.variance is not None:
            name = "variance" if self.lengthscale is None else "lengthscale"
            raise MethodError(f"{name} is for named kernels; set it on the gpytorch kernel")

    def planned_bytes(self, work: Workload) -> int:
        return exact_bytes(work.rows, work.members)

    def init(self, run: Run) -> State:
        check_gaussian(run, self.name)
        if run.problem.model is not None:
            raise ModelError(
                "gp brings its own functions and would not use the network: pass None in its "
                "place; a network's features are fitted by linear, or given to gp as x"
            )
        if not isinstance(run.rows.x, Tensor) or run.rows.x.ndim > 2:
            raise DataError("gp needs x as one array [N, D]")
        given = given_noise(run, self)[1]
        levels = shared_level(given).shape[1] if given is not None else self._learned(run)
        announce(max(map(len, run.rows.rows)), run.size * levels, self.name, run.device)
        theta, low = self._start(run)
        bounds = {"low": low, "high": theta + _WIDE}
        if self.learn_kernel:  # other members start elsewhere: the evidence may have several maxima
            first = torch.tensor([m == 0 for m in run.members], device=run.device)
            away = run.noise("start").normal((theta.shape[1],)).double()
            theta = torch.where(first[:, None], theta, theta + 0.5 * away)
        return {"theta": theta, **bounds}

    def _start(self, run: Run) -> tuple[Tensor, Tensor]:
        """Initial logarithms [M, H], of the kernel and of the noise if it is learned; and their
        lower limits."""
        x, y, weight = sample_rows(run)
        x = matrix(x, shared=False).double()
        y = y.double().reshape(*x.shape[:2], -1)
        sizes = Sizes.of(x, y, weight)
        noise = sizes.deviation.log().expand(-1, self._learned(run))
        noise, least = noise + math.log(_NOISE), noise + math.log(_LEAST)
        kernel, few = self.function(x.shape[2]).to(run.device), evenly(x.shape[1], FEW)
        x, y, weight = x[:, few], y[:, few], None if weight is None else weight[:, few]
        if not isinstance(kernel, Composed):
            check_positive(kernel, x)
            own = kernel.start().to(noise).expand(run.size, -1)
            return torch.cat([own, noise], 1), torch.cat([own - _WIDE, least], 1)
        size, variance = (first_value(run, self, name) for name in ("lengthscale", "variance"))
        counts = None if weight is None else weight > 0
        start = torch.cat([kernel_start(kernel, x, sizes, size, variance, counts), noise], 1)
        level = given_noise(run, self)[1]
        n = noise.new_full((run.size,), x.shape[1]) if weight is None else weight.sum(1)
        problem = Problem(kernel, x, y, weight, n, level)
        if self.learn_kernel:
            start = best_start(kernel, problem, start, size is None)
        return start, torch.cat([start[:, : kernel.layout.size] - _WIDE, least], 1)

    def _prior(self, run: Run, kernel: KernelFunction) -> Hyperprior | None:
        """The prior over θ of each member; of members with enough rows its precision is 0."""
        if self.hyperprior is False or not isinstance(kernel, Composed):
            return None
        few = [bool(self.hyperprior) or n < _FEW_ROWS for n in run.n.tolist()]
        if not any(few):
            return None
        x, y, weight = sample_rows(run)
        x = matrix(x, shared=False).double()
        scales = Sizes.of(x, y.double().reshape(*x.shape[:2], -1), weight)
        size, variance = (first_value(run, self, name) for name in ("lengthscale", "variance"))
        counts = None if weight is None else weight > 0
        mean = kernel_start(kernel, x, scales, size, variance, counts)
        noise = scales.deviation.log().expand(-1, self._learned(run)) + math.log(_PRIOR_NOISE)
        mean = torch.cat([mean, noise], 1)
        spread = _PRIOR_WIDTH**2 * torch.eye(mean.shape[1], dtype=mean.dtype, device=mean.device)
        for own in kernel.layout.slices.values():
            if own.stop - own.start > 1:  # columns have a factor in common
                apart = torch.eye(own.stop - own.start).to(mean)
                spread[own, own] = _PRIOR_WIDTH**2 + _APART**2 * apart
        some = torch.tensor(few, device=mean.device).to(mean)
        return Hyperprior(mean, some[:, None, None] * torch.linalg.inv(spread))

    def _learned(self, run: Run) -> int:
        """The number of learned noise levels."""
        shape = self._noise_shape(run)
        return 0 if shape is None else math.prod(shape)

    def _noise_shape(self, run: Run) -> tuple[int, ...] | None:
        """The shape of the learned noise; None if it is given."""
        likelihood, given = given_noise(run, self)
        if given is not None:
            return None
        return event_of(run) if likelihood.per_output else ()

    def reads_inputs(self, run: Run) -> bool:
        return True

    def stages(self, run: Run) -> Iterable[Stage]:
        if not self.learn_kernel:
            return
        rows = max(map(len, run.rows.rows))
        function = self.function(math.prod(run.rows.x.shape[1:])).to(run.device)

        priors: dict[tuple[Any, ...], Hyperprior | None] = {}  # of the members of a chunk

        def prior_of(run: Run) -> Hyperprior | None:
            key = (*run.run_of, *run.members)
            if key not in priors:
                priors[key] = self._prior(run, function)
            return priors[key]

        def problem_of(run: Run, batch: Batch) -> Problem:
            given = given_noise(run, self)[1]
            x, y, weight = matrix(batch.x, batch.shared).double(), batch.y.double(), batch.weight
            return Problem(
                function, x, y.reshape(*x.shape[:-1], -1),
                None if weight is None else weight.double(), run.n.double(),
                None if given is None else shared_level(given), prior_of(run),
            )  # fmt: skip

        def objective(run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
            return Evidence.apply(params["theta"], problem_of(run, batch)), {}

        def sized(stage: Stage, rows: int) -> Stage:
            return replace(stage, product=float(rows) ** 3)

        if run.steps:
            stochastic_gradient = optimise(
                objective, run.steps, name="hyper-parameters", source="all", validates=False,
                capturable=False,
            )  # fmt: skip
            yield sized(stochastic_gradient, rows)
        if not self.refine:
            return
        few = _SKETCH
        while 2 * few <= rows:
            yield sized(quasi_newton(problem_of, self.refine, f"{few} rows", few), few)
            few *= 3
        yield sized(quasi_newton(problem_of, self.refine, "refine"), rows)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        likelihood, given = given_noise(run, self)
        event, split = event_of(run), run.split_of[0]
        x, y = run.rows.of_split(split)
        function = self.function(matrix(x).shape[1]).to(run.device)
        size, learned = function.layout.size, self._noise_shape(run)
        own = event if learned is None else learned
        log_noise = state["theta"][:, size:] if given is None else given
        weight = run.rows.weight
        if weight is not None:
            weight = weight[run.rows.rows[split].to(weight.device)].double()
        posterior = GPPosterior(
            **run.common(self) | {"likelihood": likelihood}, kernel=function,
            hyper=state["theta"][:, :size].double(), log_noise=log_noise.reshape(run.size, *own),
            x=matrix(x).to(run.dtype), y=y.reshape(len(y), -1).double(), weight=weight, event=event,
        )  # fmt: skip
        posterior.record.diagnostics["kernel"] = function.named(posterior.hyper)
        if "ascent.grad" in state and posterior.record.status == "ok":
            grad, at = state["ascent.grad"], state["theta"]
            at_end = (at <= state["low"]) | (at >= state["high"])
            if given is None and bool(at_end[:, size:].any()):
                reason = (
                    "the learned noise fell to a thousandth of the targets' deviation: they have "
                    "none, or rows repeat each other; give noise="
                )
                posterior.record.status = Status("degenerate", reason)
            slope = float((grad.masked_fill(at_end, 0.0).abs().amax(1) / run.n).max())
            if slope > 1e-3:
                reason = f"the evidence still rises (slope {slope:.2g} a row): raise refine"
                posterior.record.status = Status("not-converged", reason)
        return posterior

    def function(self, inputs: int) -> KernelFunction:
        """The kernel as a function, for a loaded posterior."""
        return function_of(self.kernel, inputs, self.ard)
