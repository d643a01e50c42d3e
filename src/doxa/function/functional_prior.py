"""Functional priors: a prior over weights whose functions match those of a Gaussian process.

A standard normal prior over weights is hard to interpret: functions of a wide network under it are
large and steep, and more so with more units. Tran, Rossi, Milios & Filippone (2022) choose the
prior of each tensor so that functions drawn from it are as near as possible to those of a Gaussian
process, whose lengthscale and variance can be justified. Only inputs are used, never targets. The
posterior is then sampled as under any other prior.

`functional_prior` returns the prior, for any method; `FunctionalPrior` tunes it to the rows of a
fit and samples by SGHMC. The prior is tuned by

    min_ψ D(p_ψ(f(X)), p(f(X))),   X some measurement points, new in every step

for weights w = m + σ_g ε of each tensor g, with ψ = log σ_g, or for scales that are unknown
themselves, σ_g = exp(ψ_g + e^(ψ'_g) z), or for a flow, w = m + σ_g sinh(t_g ε)/t_g with ψ' = log t.
D is estimated on S functions of each side at N points:

    energy   2 E|f − g| − E|f − f'| − E|g − g'| (Székely & Rizzo, 2013): zero if and only if
             both are one distribution, with gradients that are unbiased at any S
    sliced   the 1-Wasserstein distance of θᵀf and θᵀg, the mean over random unit θ, by sorting
             (Bonneel et al., 2015)

where |·| is the root mean square over points and outputs: both are in the units of f. Tran et al.
(2022) bound the 1-Wasserstein distance of f(X) itself by a network of slope 1 that is trained in an
inner loop. In a test here, with 20 steps of it for each step of ψ, this took ten to twenty times as
long, and the functions were narrower than those of the target (docs/functional_priors.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data.scaling import standardise
from doxa.engine.engine import choose_engine, fall_back_to_loop
from doxa.errors import DataError, MethodError, ModelError
from doxa.function.evidence_prior import prior_variance
from doxa.mcmc.sghmc import SGHMC
from doxa.method import Run, Stage, State
from doxa.method.method import one_of, positive, whole
from doxa.model import Model
from doxa.noise import Noise
from doxa.optim import schedule
from doxa.posterior import Posterior, SamplePosterior
from doxa.priors import FlowPrior, Hierarchical, Normal, Prior, bind, stack_bound
from doxa.priors.functions import KERNELS, FunctionPrior, GPPrior, HierarchicalGP

_SLICES = 128  # directions in a step
_FIRST_SHAPE = 0.3  # of log σ where it is unknown, and the first tail of a flow


class Matched(NamedTuple):
    """The tuned priors of R runs."""

    names: tuple[str, ...]  # of the tensors
    log_scale: Tensor  # [R, tensors]
    log_shape: Tensor | None
    distances: Tensor  # [R, steps]
    kind: str

    def priors(self, run: int) -> dict[str, Prior]:
        """The prior of every tensor of one run, by name."""
        scale = self.log_scale[run].double().exp().tolist()
        if self.log_shape is None:
            return {n: Normal(s) for n, s in zip(self.names, scale, strict=True)}
        shape = self.log_shape[run].double().exp().tolist()
        each = zip(self.names, scale, shape, strict=True)
        if self.kind == "flow":
            return {n: FlowPrior(s, a) for n, s, a in each}
        return {n: Hierarchical("log-normal", s, a) for n, s, a in each}


@dataclass(frozen=True)
class Matching:
    """The settings of the tuning: see `doxa.functional_prior`."""

    target: FunctionPrior
    kind: str = "gaussian"
    distance: str = "energy"
    steps: int = 300
    functions: int = 128
    points: int = 48
    rate: float = 0.05

    def __call__(self, model: Model, rows: Sequence[Tensor], seeds: Sequence[int]) -> Matched:
        """Tuned at rows [L_r, ...] of each run r, with random numbers of its seed."""
        sides = Sides(self, model, rows, seeds)
        psi = sides.start()
        optimiser = torch.optim.Adam([psi], self.rate)
        rates = schedule("cosine", self.steps)
        mean, distances = torch.zeros_like(psi), []
        late = max(1, self.steps // 4)
        for t in range(self.steps):
            with torch.enable_grad():
                f, g = sides.draw(psi.requires_grad_(), t)
                if self.distance == "energy":
                    apart = energy(f, g)  # [R]
                else:
                    apart = sliced(f, g, sides.noise.normal((f.shape[-1], _SLICES), t, 5))
                (psi.grad,) = torch.autograd.grad(apart.sum(), psi)
            optimiser.param_groups[0]["lr"] = self.rate * float(rates[t])
            optimiser.step()
            distances.append(apart.detach())
            if t >= self.steps - late:
                mean += psi.detach() / late
        scale, *more = mean.split(len(sides.names), 1)
        shape = more[0] if more else None
        return Matched(sides.names, scale, shape, torch.stack(distances, 1), self.kind)


class Sides:
    """Functions of both priors at new points in every step."""

    def __init__(
        self, how: Matching, model: Model, rows: Sequence[Tensor], seeds: Sequence[int]
    ) -> None:
        if any(not isinstance(x, Tensor) or not x.is_floating_point() for x in rows):
            raise DataError("a functional prior needs x as one array of real numbers")
        if model.output is None or not all(isinstance(size, int) for size in model.output):
            raise ModelError("a functional prior is for a network with one output")
        self.how, self.model, self.outputs = how, model, math.prod(model.output)
        entries = [e for e in model.layout.entries if not e.name.startswith("likelihood.")]
        self.entries, self.names = entries, tuple(e.name for e in entries)
        device, dtype = model.device, model.dtype
        sizes = torch.tensor([e.size for e in entries])
        spread = lambda values: torch.repeat_interleave(torch.as_tensor(values), sizes).to(device)  # noqa: E731
        self.place = spread(torch.arange(len(entries)))  # the tensor of each weight, [P]
        self.centre = spread([e.centre for e in entries]).to(dtype)
        longest = max(len(x) for x in rows)
        self.rows = torch.stack(  # [R, L, ...]; those that only fill a run up are never drawn
            [x[torch.arange(longest) % len(x)].to(device, dtype) for x in rows]
        )
        self.lengths = torch.tensor([len(x) for x in rows], device=device, dtype=dtype)
        self.low, self.high = self.rows.amin(1, True), self.rows.amax(1, True)
        self.noise = Noise(0, "functional prior", [*seeds], device, dtype)
        self.engine = choose_engine(model, len(rows) * how.functions, device)

        def trial(tried: object) -> None:
            self.engine = tried  # type: ignore[assignment]
            self.draw(self.start(), 0)

        self.engine = fall_back_to_loop(self.engine, trial)

    def start(self) -> Tensor:
        """Scales with which units of any width have inputs of the same size, [R, tensors] or twice
        as many."""
        log_scale = torch.tensor([-0.5 * math.log(e.fan_in) for e in self.entries])
        if self.how.kind != "gaussian":
            shape = torch.full_like(log_scale, math.log(_FIRST_SHAPE))
            log_scale = torch.cat([log_scale, shape])
        return log_scale.to(self.rows).repeat(len(self.rows), 1)

    def measure(self, t: int) -> Tensor:
        """Half of the points are rows of the data, half are uniform in their range: [R, N, ...]."""
        half, shape = self.how.points // 2, self.rows.shape[2:]
        u = self.noise.uniform((half,), t, 0) * self.lengths[:, None]  # (0, L]
        index = (u.ceil().long() - 1).clamp(min=0).clamp(max=self.rows.shape[1] - 1)
        each = torch.arange(len(self.rows), device=index.device)[:, None]
        free = self.noise.uniform((self.how.points - half, *shape), t, 1)
        return torch.cat([self.rows[each, index], torch.lerp(self.low, self.high, free)], 1)

    def draw(self, psi: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Functions of the network and of the target, [R, S, N·outputs]."""
        x, s = self.measure(t), self.how.functions
        runs, tensors = len(x), len(self.names)
        eps = self.noise.normal((s, len(self.place)), t, 2)
        log_scale = psi[:, None, :tensors]
        if self.how.kind == "flow":
            tail = psi[:, None, tensors:].exp()[..., self.place]
            eps = torch.sinh(tail * eps) / tail
        elif self.how.kind == "hierarchical":
            z = self.noise.normal((s, tensors), t, 3)
            log_scale = log_scale + psi[:, None, tensors:].exp() * z
        flat = self.centre + log_scale.exp()[..., self.place] * eps  # [R, S, P]
        each = flat.flatten(0, 1).split([e.size for e in self.entries], -1)
        weights = {e.name: w.reshape(-1, *e.shape) for e, w in zip(self.entries, each, strict=True)}
        shared = runs == 1
        inputs = x[0] if shared else x.repeat_interleave(s, 0)
        f = self.engine.apply(self.model, weights, inputs, shared=shared).f
        drawn = self.noise.normal((s, *self.how.target.noise_shape(x.shape[1], self.outputs)), t, 4)
        g = self.how.target.functions(x, drawn, self.outputs)
        return f.reshape(runs, s, -1), g.reshape(runs, s, -1)


def energy(f: Tensor, g: Tensor) -> Tensor:
    """The unbiased energy distance of draws [R, S, D] and [R, S', D]: [R]. It may be below zero if
    both distributions are equal."""

    def within(a: Tensor) -> Tensor:
        return _mean_distance(a, a) * (a.shape[1] / (a.shape[1] - 1))  # without i = j

    return 2 * _mean_distance(f, g) - within(f) - within(g)


def _mean_distance(a: Tensor, b: Tensor) -> Tensor:
    squares = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :]
    apart = (squares - 2 * a @ b.mT) / a.shape[-1]
    apart = torch.where(apart > 1e-9, apart, torch.zeros_like(apart))  # and no slope at 0
    return (apart.clamp_min(1e-18).sqrt() * (apart > 0)).mean((-2, -1))


def sliced(f: Tensor, g: Tensor, directions: Tensor) -> Tensor:
    """The mean 1-Wasserstein distance of draws [R, S, D] along directions [R, D, L], [R]. On a
    line, the optimal plan pairs the draws in order of size."""
    unit = directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    along = [(side @ unit).sort(1).values for side in (f, g)]  # [R, S, L]
    return (along[0] - along[1]).abs().mean((1, 2))


_ROWS = 1024  # of a run, evenly spaced, at which functions are compared


class TunedPrior(dict[str, Prior]):
    """A dict {tensor: prior} for `prior=`, with the distances during tuning, [steps]."""

    distances: Tensor
    target: FunctionPrior


def functional_prior(
    model: Model | nn.Module,
    x: Any,
    target: str | FunctionPrior = "rbf",
    *,
    kind: str = "gaussian",
    lengthscale: float | None = None,
    variance: float | None = None,
    spread: float | None = None,
    distance: str = "energy",
    steps: int = 300,
    functions: int = 128,
    points: int = 48,
    standardize: bool = False,
    seed: int = 0,
) -> TunedPrior:
    """The prior of each tensor for which a network's functions are nearest to those of a target.

    Parameters
    ----------
    model : Model or nn.Module
        The network. The prior of a `Model` is not used.
    x : array-like
        Inputs, [N, ...]. Functions are compared at these rows and in their range.
    target : str or FunctionPrior
        "rbf", "matern", "periodic" or "linear": a Gaussian process with that kernel; or a
        `doxa.GPPrior` or `doxa.ImplicitPrior`, in the units in which the network is fitted.
    kind : {"gaussian", "hierarchical", "flow"}
        "gaussian": `Normal` with a scale for each tensor. "hierarchical": `Hierarchical` with a
        log-normal scale whose width is tuned, too, so that functions may have heavier tails.
        "flow": `FlowPrior`, weights with tuned tails.
    lengthscale, variance : float, optional
        Of a named target. The default lengthscale is √(2D) for D columns, at which two
        standardised rows have correlation e^(−½). The default variance is 1, or 8 for the logits
        of a `Model` of classes (as in the paper): with logits of variance 1, labels are mostly
        chance.
    spread : float, optional
        If it is given, each function of a named target has its own lengthscale for each column and
        its own variance, and their logarithms have this standard deviation (`doxa.HierarchicalGP`).
    distance : {"energy", "sliced"}
        The distance between the functions; "sliced" is a Wasserstein distance. The equations are in
        the docstring of this module.
    steps : int
        Steps of the tuning.
    functions, points : int
        The number of functions of each side, and of inputs, that are compared in a step.
    standardize : bool
        Whether x is scaled as by `fit(standardize=True)`.
    seed : int
        The random seed.

    Returns
    -------
    TunedPrior
        A dict {name of a tensor: prior} for `Model` and `fit`, with the attributes `.distances`
        [steps] and `.target`.

    Examples
    --------
    >>> import doxa, torch
    >>> x = torch.linspace(-2, 2, 50).reshape(-1, 1)
    >>> prior = doxa.functional_prior(doxa.nets.mlp(1, 1), x, lengthscale=0.5, steps=5)
    >>> model = doxa.Model(doxa.nets.mlp(1, 1), "gaussian", prior)
    """
    method = FunctionalPrior(
        target=target, kind=kind, lengthscale=lengthscale, variance=variance, spread=spread,
        distance=distance, prior_steps=steps, functions=functions, points=points,
    )  # fmt: skip
    network = model if isinstance(model, Model) else Model(model)
    rows = torch.as_tensor(x).to(network.device)
    if rows.ndim == 0 or len(rows) == 0:
        raise DataError("functions are compared at the rows of x: there are none")
    if rows.is_floating_point():
        rows = rows.unsqueeze(1) if rows.ndim == 1 else rows
        if not bool(torch.isfinite(rows).all()):
            raise DataError("x has values that are not finite")
        if standardize:
            (scales,) = standardise(rows, None, [torch.arange(len(rows))], scale_y=False)
            rows = scales.x(rows)
        rows = rows.to(network.dtype)
    matching = method.matching(math.prod(rows.shape[1:]), prior_variance(network.likelihood))
    few = rows[_evenly(len(rows)).to(rows.device)]
    found = matching(network.build(rows), [_distinct(few)], [seed])
    prior = TunedPrior(found.priors(0))
    prior.distances, prior.target = found.distances[0].cpu(), matching.target
    return prior


def _evenly(rows: int) -> Tensor:
    """Numbers of up to 1,024 rows, evenly spaced."""
    return torch.linspace(0, rows - 1, min(rows, _ROWS)).long()


def _distinct(x: Any) -> Tensor:
    """The distinct rows: a repeated row is not another input."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError("a functional prior needs x as one array of real numbers")
    return torch.unique(x.cpu(), dim=0).to(x.device)


@store.register("functional-prior")
@dataclass(frozen=True)
class FunctionalPrior(SGHMC):
    """SGHMC under a prior that is tuned to a process before: see `doxa.functional_prior`, which
    gives the prior alone, for any other method. The model's own prior is replaced.

    Parameters
    ----------
    target, kind, lengthscale, variance, spread, distance, functions, points
        As in `doxa.functional_prior`.
    prior_steps : int
        Steps that tune the prior.
    draws, burn_in, thin, step_size, friction, gradient_noise, temperature
        As in `SGHMC`.
    """

    name: ClassVar[str] = "functional-prior"
    shares: ClassVar[str] = "none"  # the members of a run have one tuned prior
    renamed: ClassVar[Mapping[str, str]] = {**SGHMC.renamed, "tuning": "prior_steps"}
    large_copies: ClassVar[tuple[float, float] | None] = None

    target: str | FunctionPrior = one_of(
        *KERNELS, or_a=FunctionPrior, called="a GPPrior or an ImplicitPrior"
    )
    kind: str = one_of("gaussian", "hierarchical", "flow")
    lengthscale: float | None = positive(None)
    variance: float | None = positive(None)
    spread: float | None = positive(None)
    distance: str = one_of("energy", "sliced")
    prior_steps: int = whole(300, least=1)
    functions: int = whole(128, least=2)
    points: int = whole(48, least=2)

    def matching(self, columns: int, size: float = 1.0) -> Matching:
        """How the prior is tuned, for a network with so many columns of x; `size` is the default
        variance of a named target."""
        target, size = self.target, size if self.variance is None else self.variance
        if not isinstance(target, FunctionPrior):
            length = math.sqrt(2.0 * columns) if self.lengthscale is None else self.lengthscale
            target = GPPrior(target, length, size)
            if self.spread is not None:
                each = (length,) * columns
                target = HierarchicalGP(target.kernel, each, size, spread=self.spread)
        elif (self.lengthscale, self.variance, self.spread) != (None, None, None):
            raise MethodError("lengthscale, variance and spread are for a named target: set "
                              "them in the target itself")  # fmt: skip
        return Matching(
            target, self.kind, self.distance, self.prior_steps, self.functions, self.points,
        )  # fmt: skip

    def _tuned(self, run: Run) -> Matched:
        """The tuned priors of the runs. They do not depend on which members are fitted."""
        return run.once("functional prior", lambda: self._tune(run))

    def _tune(self, run: Run) -> Matched:
        first = _first_of_runs(run)
        rows = []
        for m in first:
            index, weight = run.rows.rows[run.split_of[m]], run.rows.weight
            if weight is not None:
                own = weight if weight.ndim == 1 else weight[m]
                index = index[own.cpu()[index] > 0]
            few = index[_evenly(len(index))]
            rows.append(_distinct(run.rows.take(few, torch.tensor(run.run_of[m]))[0]))
        matching = self.matching(math.prod(rows[0].shape[1:]), prior_variance(run.likelihood))
        return matching(run.net, rows, [run.seeds[m] for m in first])

    def _under_it(self, run: Run) -> Run:
        """The run under the tuned priors."""

        def made() -> Run:
            found = self._tuned(run)
            bound = [bind(found.priors(r), run.layout) for r in range(len(found.log_scale))]
            place = {run.run_of[m]: r for r, m in enumerate(_first_of_runs(run))}
            one = len(bound) == 1
            prior = bound[0] if one else stack_bound([bound[place[r]] for r in run.run_of])
            return replace(run, prior=prior.to(run.device, run.dtype))

        return run.once("under a functional prior", made)

    def reads_inputs(self, run: Run) -> bool:
        return True

    def init(self, run: Run) -> State:
        state, found = super().init(run), self._tuned(run)
        place = {run.run_of[m]: r for r, m in enumerate(_first_of_runs(run))}
        each = [place[r] for r in run.run_of]
        state["prior.log_scale"] = found.log_scale[each]
        state["prior.distances"] = found.distances[each]
        if found.log_shape is not None:
            state["prior.log_shape"] = found.log_shape[each]
        return state

    def stages(self, run: Run) -> Iterable[Stage]:
        own = self._under_it(run)
        for stage in super().stages(own):
            stage.step = _always(own, stage.step)
            yield stage

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        names = tuple(n for n in run.layout.names if not n.startswith("likelihood."))
        distances = state["prior.distances"]
        scale, shape = state["prior.log_scale"], state.get("prior.log_shape")
        found = Matched(names, scale, shape, distances, self.kind)
        posterior = super().finish(run, state, kept)
        assert isinstance(posterior, SamplePosterior)
        posterior.priors = [found.priors(m) for m in range(run.size)]
        posterior.record.diagnostics["prior_distances"] = distances[0].tolist()
        return posterior


def _always(own: Run, step: Any) -> Any:
    """The step with the run under the tuned prior, whichever run it is called with."""
    return lambda run, state, batch, clock: step(own, state, batch, clock)


def _first_of_runs(run: Run) -> list[int]:
    """The first member of each run."""
    return [run.run_of.index(r) for r in dict.fromkeys(run.run_of)]
