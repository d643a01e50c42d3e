"""Exact Gaussian-process regression.

    f ~ GP(0, k),  y = f(x) + ε,  ε ~ N(0, σ²)
    f* | y ~ N(k*ᵀ(K + σ²I)⁻¹y,  k** − k*ᵀ(K + σ²I)⁻¹k*)
    log p(y) = −½ yᵀ(K + σ²I)⁻¹y − ½ log |K + σ²I| − (n/2) log 2π

Rasmussen & Williams (2006), Algorithm 2.1, on gpytorch's kernels. Hyper-parameters of the kernel
and the noise are found by type-II maximum likelihood: the gradient of log p(y), in logarithms.
Everything is float64, whatever the data's type. Several outputs share the kernel. Members after
the first start from perturbed hyper-parameters. Its cost is n³ a step: up to about 10,000 rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from gpytorch.kernels import Kernel, LinearKernel, ScaleKernel
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.errors import DataError, MethodError, ModelError
from doxa.exact.targets import check_gaussian, event_of, given_noise
from doxa.function.kernels import NAMED, KernelFunction, KernelSpec, build
from doxa.function.process import GPPosterior, log_evidence, solve
from doxa.function.quasi_newton import quasi_newton
from doxa.method import Clock, Method, Run, Stage, State, optimise
from doxa.method.fields import flag, one_of, positive, whole
from doxa.posterior import Posterior, Status


@store.register("gp")
@dataclass(frozen=True)
class GP(Method):
    """Exact GP regression.

    Parameters
    ----------
    kernel: "rbf" (squared exponential), "matern" (ν = 5/2), "linear" (k = v xᵀx'), or a gpytorch
        kernel, which starts from its own values and needs a registered builder to be saved.
    noise: the noise's standard deviation in units of y; None: as the likelihood says, else fitted.
    fit_hyper: fit the kernel's hyper-parameters (and the noise); False keeps the initial ones.
    lengthscale, variance: initial values of a named kernel, in fitted units; None: the median
        distance between rows, and the mean square of y.
    ard: a lengthscale for each column of x.
    refine: quasi-Newton steps that bring the hyper-parameters to their maximum, after `fit`'s
        steps of gradient ascent have come near.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(0, 6, 30).double()[:, None]
    >>> posterior = doxa.fit(None, (x, x.sin()), doxa.GP(noise=0.01), steps=50)
    >>> bool((posterior.predict(x).mean - x.sin()).abs().max() < 0.01)
    True
    """

    name: ClassVar[str] = "gp"
    default_steps: ClassVar[int] = 20
    default_rate: ClassVar[float] = 0.1
    needs_network: ClassVar[bool] = False
    regression_only: ClassVar[bool] = True

    kernel: str | KernelSpec | Kernel = one_of(
        *NAMED, or_a=(Kernel, KernelSpec), called="a gpytorch kernel"
    )
    noise: float | None = positive(None, per_run=True)
    fit_hyper: bool = flag(True)
    lengthscale: float | None = positive(None, per_run=True)
    variance: float | None = positive(None, per_run=True)
    ard: bool = flag(False)
    refine: int = whole(40, least=0)

    def __post_init__(self) -> None:
        if isinstance(self.kernel, Kernel):
            object.__setattr__(self, "kernel", KernelSpec.of(self.kernel) or self.kernel)
        super().__post_init__()
        for name in ("lengthscale", "variance"):
            if getattr(self, name) is not None and not isinstance(self.kernel, str):
                raise MethodError(f"{name} is for named kernels; set it on the gpytorch kernel")

    def init(self, run: Run) -> State:
        check_gaussian(run, self.name)
        if run.problem.model is not None:
            raise ModelError(
                "gp brings its own functions and would not use the network: pass None in its "
                "place; a network's features are fitted by linear, or given to gp as x"
            )
        if not isinstance(run.rows.x, Tensor) or run.rows.x.ndim > 2:
            raise DataError("gp needs x as one array [N, D]")
        rows = [self._start(run, m) for m in range(run.size)]
        theta = torch.stack(rows).to(run.device)
        if self.fit_hyper:  # other members start elsewhere: the evidence may have several maxima
            first = torch.tensor([m == 0 for m in run.members], device=run.device)
            away = run.noise("start").normal((theta.shape[1],)).double()
            theta = torch.where(first[:, None], theta, theta + 0.5 * away)
        return {"theta": theta}

    def _start(self, run: Run, m: int) -> Tensor:
        """Initial logarithms of one member: the kernel's, then the noise if it is learned."""
        rows = run.rows.rows[run.split_of[m]]
        few = rows[torch.linspace(0, len(rows) - 1, min(len(rows), 256)).long()]
        x, y = run.rows.take(few, torch.tensor(run.run_of[m]))
        x, y = matrix(x).double(), y.double()
        kernel = build(self.kernel, x.shape[1], self.ard)
        if isinstance(self.kernel, str):
            power = float(y.square().mean()) or 1.0
            if isinstance(kernel, LinearKernel):
                size = float(x.square().sum(1).mean()) or 1.0
                kernel.variance = self._value(run, "variance", m, power / size)
            if isinstance(kernel, ScaleKernel):
                kernel.outputscale = self._value(run, "variance", m, power)
                kernel.base_kernel.lengthscale = self._value(run, "lengthscale", m, _distance(x))
        start = KernelFunction(kernel).start()
        shape = self._noise_shape(run)
        if shape is None:
            return start
        spread = 0.3 * (float(y.std()) if y.numel() > 1 else 0.0)
        return torch.cat([start, torch.full((math.prod(shape),), math.log(spread or 0.3)).double()])

    def _value(self, run: Run, field: str, m: int, default: float) -> Tensor:
        """As a tensor: gpytorch rounds plain numbers to float32."""
        value = run.hyper[field][m] if field in run.hyper else getattr(self, field)
        return torch.tensor(default if value is None else float(value), dtype=torch.float64)

    def _noise_shape(self, run: Run) -> tuple[int, ...] | None:
        """The shape of the learned noise, None where it is given."""
        likelihood, given = given_noise(run, self)
        if given is not None:
            return None
        return event_of(run) if getattr(likelihood, "per_output", False) else ()

    def _function(self, run: Run) -> KernelFunction:
        inputs = math.prod(run.rows.x.shape[1:])
        return KernelFunction(build(self.kernel, inputs, self.ard)).to(run.device)

    def stages(self, run: Run) -> Iterable[Stage]:
        if not self.fit_hyper:
            return
        function = self._function(run)

        def one(run: Run, batch: Batch, m: int, row: Tensor) -> Tensor:
            kernel, noise = self._split(function, row, given_noise(run, self)[1], m)
            x, y, weight = _member_rows(batch, m)
            parts = solve(function(kernel, x, x), y, noise, weight)
            return log_evidence(parts, noise, float(run.n[m]))

        def objective(run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
            each = [one(run, batch, m, row) for m, row in enumerate(params["theta"])]
            return torch.stack(each), {}

        def evaluate(run: Run, batch: Batch, m: int, row: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                leaf = row.detach().requires_grad_()
                value = one(run, batch, m, leaf)
                (grad,) = torch.autograd.grad(value, leaf)
            return value.detach(), grad

        factor = float(max(len(rows) for rows in run.rows.rows)) ** 3  # of the kernel's matrix
        climb = optimise(
            objective, run.steps, name="hyper-parameters", source="all", validates=False,
            capturable=False,
        )  # fmt: skip
        yield replace(climb, product=factor)
        if self.refine:
            yield replace(quasi_newton(evaluate, self.refine), product=factor)

    def _split(
        self, function: KernelFunction, row: Tensor, log_noise: Tensor | None, m: int
    ) -> tuple[Tensor, Tensor]:
        """The kernel's part of one member's vector, and log σ [O'] of its outputs."""
        size = function.layout.size
        return row[:size], row[size:] if log_noise is None else log_noise[m]

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        function = self._function(run)
        likelihood, given = given_noise(run, self)
        pairs = [self._split(function, row, given, m) for m, row in enumerate(state["theta"])]
        event, split = event_of(run), run.split_of[0]
        learned = self._noise_shape(run)
        own = event if learned is None else learned
        x, y = run.rows.of_split(split)
        weight = run.rows.weight
        if weight is not None:
            weight = weight[run.rows.rows[split].to(weight.device)].double()
        posterior = GPPosterior(
            **run.common(self) | {"likelihood": likelihood}, kernel=function,
            hyper=torch.stack([kernel for kernel, _ in pairs]).double(),
            log_noise=torch.stack([noise.expand(math.prod(own)) for _, noise in pairs])
            .reshape(run.size, *own),
            x=matrix(x).to(run.dtype), y=y.reshape(len(y), -1).double(), weight=weight, event=event,
        )  # fmt: skip
        posterior.record.diagnostics["kernel"] = function.named(posterior.hyper)
        if "ascent.grad" in state and posterior.record.status == "ok":
            slope = float((state["ascent.grad"].abs().amax(1) / run.n).max())
            if slope > 1e-3:
                reason = f"the evidence still rises (slope {slope:.2g} a row): raise refine"
                posterior.record.status = Status("not-converged", reason)
        return posterior

    def function(self, inputs: int) -> KernelFunction:
        """The kernel as a function, for a loaded posterior."""
        return KernelFunction(build(self.kernel, inputs, self.ard))


def matrix(x: Tensor) -> Tensor:
    return x.unsqueeze(-1) if x.ndim == 1 else x


def _distance(x: Tensor) -> float:
    """The median distance between rows, 1 where they coincide."""
    away = torch.pdist(x)
    return float(away.median()) or 1.0 if len(away) else 1.0


def _member_rows(batch: Batch, m: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs [N, D], targets [N, O] and weights of one member; rows that only pad are left out."""
    x, y = (batch.x, batch.y) if batch.shared else (batch.x[m], batch.y[m])
    x, y, weight = matrix(x).double(), y.reshape(len(y), -1).double(), batch.weight
    if weight is not None:
        weight = (weight if weight.ndim == 1 else weight[m]).double()
        counts = weight > 0
        x, y, weight = x[counts], y[counts], weight[counts]
    return x, y, weight
