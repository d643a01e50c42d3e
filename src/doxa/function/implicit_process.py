"""Variational implicit processes: a network's prior functions as the basis of a linear model.

    f_s = g(·, θ_s), θ_s = μ + σ ∘ w_s,   s = 1…S,   w_s drawn once from the weight prior
    m = (1/S) Σ f_s,   φ_s = (f_s − m)/√S,   f(x) = m(x) + Σ_s a_s φ_s(x),   a ~ N(0, I)

so f is the Gaussian process with the mean and covariance of the draws. q(a) = N(b, LLᵀ), the
prior's (μ, σ) and the noise are trained together; they ascend the α-energy

    L_α = (1/α) Σ_i log E_q[p(y_i | f_i)^α] − KL(q(a) ‖ N(0, I)),

which is the ELBO as α → 0, and at α = 1 a sum of predictive densities. Ma, Li & Hernández-Lobato
(2019) use α = ½. Under Gaussian noise each term is in closed form. With `exact`, the final q(a) is
then the posterior of a under the learned prior, from a pass over the data. With other likelihoods
E_q is a mean over `samples` draws of a. The outputs of a network share a.

The noise w_s is drawn once, so that q(a) is over the same functions in every step. The posterior
lies in the span of S functions: with as few as 20 there is little variance far from the data,
unless the learned prior provides it. Weights outside the subset, and the parameters of the
likelihood, are point estimates under their prior; (μ, σ) have no prior (type-II maximum
likelihood). Dropout is off, and BatchNorm is not changed.

The term of each row in the α-energy, for functions that are linear in normal weights a, is

    (1/α) log E_q[p(y | f)^α],   f = m + Σ_s a_s φ_s,   a ~ N(b, LLᵀ)

which is E_q log p as α → 0 and the log predictive density at α = 1 (Li & Gal, 2017; Ma, Li &
Hernández-Lobato, 2019). The posterior is S functions and a Gaussian over their weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa import store
from doxa.data import Batch, rows_of
from doxa.errors import MethodError, ModelError, StoreError, Unavailable
from doxa.linalg.layout import Params
from doxa.method import (
    Clock,
    Method,
    Run,
    Stage,
    State,
    average_name,
    averaged,
    network_part,
    noise_on_held_out,
    optimise,
)
from doxa.method.method import between, flag, plain, positive, whole
from doxa.model import likelihood_parameters
from doxa.noise import Noise, generator
from doxa.posterior import Posterior, register_posterior
from doxa.posterior.base import each
from doxa.posterior.weights import DEFAULT_SAMPLES, FunctionDraws, WeightPosterior
from doxa.predictive import Moments, Predictive
from doxa.priors.functions import ImplicitPrior
from doxa.vi.gaussian import moved


class FunctionMoments(NamedTuple):
    """f at rows under q(a): its mean [M, B, O], and H [M, S, B, O] with covariance Σ_s H_s H_sᵀ."""

    mean: Tensor
    half: Tensor

    def variance(self) -> Tensor:
        return self.half.square().sum(1)


def energies(
    run: Run, q: State, f: FunctionMoments, batch: Batch, alpha: float, eps: Tensor | None
) -> Tensor:
    """(1/α) log E_q[p(y | f)^α] of each row, [M, B]; E_q log p at α = 0. It is a closed form for
    Gaussian noise, and otherwise a mean over draws of a from ε [M, T, S]."""
    theta = q["mean"]
    if run.likelihood.integrates_normal:
        given = run.likelihood_theta(theta)
        own = shaped(run, f.mean)
        noise = run.likelihood.variance(own, given, lead=1).reshape(f.mean.shape)
        if alpha == 0:
            lost = 0.5 * (f.variance() / noise).sum(-1)
            return run.log_likelihoods_of(own, theta, batch) - lost
        y = batch.y.reshape(*batch.y.shape[: 2 - batch.shared], -1)
        return gaussian_energy(y - f.mean, f.half, noise, alpha)
    assert eps is not None
    count = eps.shape[1]
    drawn = f.mean.unsqueeze(1) + torch.einsum("msbo,mts->mtbo", f.half, eps)
    many = run.expand_particles(count)
    each = many.log_likelihoods_of(
        shaped(run, drawn.flatten(0, 1)),
        theta.repeat_interleave(count, 0),
        batch.expand_particles(count),
    ).unflatten(0, (-1, count))
    if alpha == 0:
        return each.mean(1)
    return (torch.logsumexp(alpha * each, 1) - math.log(count)) / alpha


def gaussian_energy(left: Tensor, half: Tensor, noise: Tensor, alpha: float) -> Tensor:
    """The energy from p^α = (2πσ²)^((1−α)/2) α^(−½) N(y; f, σ²/α) for each output: [M, B]."""
    covariance = torch.einsum("msbo,msbp->mbop", half, half) + torch.diag_embed(noise / alpha)
    factor = torch.linalg.cholesky_ex(covariance).L
    white = torch.linalg.solve_triangular(factor, left.unsqueeze(-1), upper=False)
    logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    two_pi = math.log(2 * math.pi)
    density = -0.5 * white.square().sum((-2, -1)) - logs - 0.5 * left.shape[-1] * two_pi
    more = 0.5 * ((1 - alpha) * (noise.log() + two_pi) - math.log(alpha)).sum(-1)
    return (density + more) / alpha


def root_of(free: Tensor) -> Tensor:
    """L, lower triangular, from the trained values, which have the logarithms of its diagonal."""
    return free.tril(-1) + torch.diag_embed(free.diagonal(dim1=-2, dim2=-1).exp())


def divergence(q: State) -> Tensor:
    """KL(q(a) ‖ N(0, I)), [M]."""
    root = root_of(q["a_root"])
    logs = q["a_root"].diagonal(dim1=-2, dim2=-1).sum(-1)
    away = q["a_mean"].square().sum(-1) + root.square().sum((-2, -1)) - root.shape[-1]
    return 0.5 * away - logs


def shaped(run: Run, f: Tensor) -> Tensor:
    """f [M, B, O] in the output shape of the network."""
    return f.reshape(*f.shape[:2], *run.net.output)


_BLOCK_BYTES = 64 << 20  # of draws at a time


@register_posterior
class ImplicitProcessPosterior(WeightPosterior):
    """f = m + Σ_s a_s φ_s with a ~ N(b, LLᵀ), one per member: a Gaussian process of rank S.

    point: weights outside the subset and the likelihood's own parameters, [K, P]. basis: the
    weights of the S functions, [K, S, P], or the noise of a given prior's, [K, S, numbers]. a_mean:
    b, [K, S]. a_root: L, [K, S, S].

    With Gaussian noise `predict` gives marginals in closed form, whatever n; otherwise it draws a.
    `functions` draws a, and so whole functions.
    """

    kind = "implicit-process"
    flat = "_point"

    def __init__(
        self, *args: Any, point: Tensor, basis: Tensor, a_mean: Tensor, a_root: Tensor, **kw: Any
    ) -> None:
        super().__init__(*args, **kw)
        self._point, self.basis, self.a_mean, self.a_root = point, basis, a_mean, a_root

    def check_restored(self) -> None:
        if self._point.ndim != 2 or self.basis.ndim != 3:
            raise StoreError(f"the basis has the shape {list(self.basis.shape)}")
        super().check_restored()
        k, s, p = self.basis.shape
        size = self.layout.size if self.method.function_prior is None else p
        for name, shape in (("basis", (k, s, size)), ("a_mean", (k, s)), ("a_root", (k, s, s))):
            self._check_tensor(name, getattr(self, name), shape)
        self._check_tensor("point", self._point, (k, self.layout.size))

    @property
    def members(self) -> int:
        return self.basis.shape[0]

    def _reference(self) -> Tensor:
        return self._point

    def point(self) -> Tensor:
        """The prior's mean weights."""
        return self._point

    def groups(self, n: int | None, seed: int) -> Iterable[FunctionDraws]:
        raise Unavailable(f"a {self.kind} posterior has no weights to draw: it mixes functions")

    def _basis(self, x: Any, who: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """m [K, N, ...] and φ [K, S, N, ...] at fitted x, for all members or for those in `who`."""
        who = torch.arange(self.members, device=self.device) if who is None else who
        basis, given = self.basis[who], self.method.function_prior
        k, s = basis.shape[:2]
        if given is None:
            params = self.layout.unflatten(basis.flatten(0, 1))
            each_function = who.repeat_interleave(s)
            if self.layers is not None:
                params |= self.network.layers.unflatten(self.layers[each_function])
            buffers = {name: v[each_function] for name, v in self.buffers.items()}
            f = self.evaluate(FunctionDraws(params, k * s, buffers=buffers), x)
            if not isinstance(f, Tensor):
                raise ModelError("vip takes networks of one head, and this one has several")
            f = f.unflatten(0, (k, s))
        else:
            output = tuple(self.network.output)
            f = given.functions(x.expand(k, *x.shape), basis, math.prod(output))
            f = f.reshape(*f.shape[:3], *output)
        mean = f.mean(1)
        return mean, (f - mean.unsqueeze(1)) / math.sqrt(s)

    def _pieces(self, x: Any, functions: int) -> Iterator[Any]:
        """Blocks of rows at which so many functions, or the whole basis, fit into limited
        memory."""
        outputs = math.prod(self.network.output) * self.dtype.itemsize
        block = max(1, _BLOCK_BYTES // (max(functions, self.basis[..., 0].numel()) * outputs))
        for start in range(0, rows_of(x, "x"), block):
            yield each(lambda t, a=start: t[a : a + block], x)

    def _own_theta(self) -> Params:
        """The likelihood's parameters of each member, {name: [K, ...]}."""
        own = likelihood_parameters(self.layout.unflatten(self._point))
        count = len(self._point)
        return own | {name: v.expand(count, *v.shape) for name, v in self.constants.items()}

    def _predict_constant_noise(
        self, x: Any, n: int | None, seed: int | None, keep: str
    ) -> Predictive:
        seed = self.sampling(n, seed, keep)
        x = self.check_inputs(x)
        if self.base_likelihood.integrates_normal:
            parts = [self._marginals(piece) for piece in self._pieces(x, 1)]
            f, variance = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            return Predictive(f, self.likelihood, self._own_theta(), f_variance=variance)
        count = DEFAULT_SAMPLES if n is None else n
        who = torch.tensor([k for k, c in enumerate(self.split(count)) for _ in range(c)])
        theta = {name: v[who.to(v.device)] for name, v in self._own_theta().items()}
        if keep == "moments":
            return self._moments(x, count, seed, theta)
        self._check_memory(count, rows_of(x, "x"))
        return Predictive(self._drawn(x, count, seed, "draws"), self.likelihood, theta)

    def _marginals(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of f of each member, [K, N, ...]."""
        mean, phi = self._basis(x)
        flat = phi.flatten(2)
        half = self.a_root.mT @ flat
        shift, variance = (self.a_mean.unsqueeze(1) @ flat).squeeze(1), half.square().sum(1)
        return mean + shift.view_as(mean), variance.view_as(mean)

    def _moments(self, x: Any, n: int, seed: int, theta: Params) -> Predictive:
        """The moments over n draws, in blocks of rows. The functions are the same in all blocks."""
        parts = []
        for piece in self._pieces(x, n):
            total = Moments(self.likelihood)
            total.update(self._drawn(piece, n, seed, "draws"), theta)
            parts.append(total.result())
        return Predictive.concat(parts) if len(parts) > 1 else parts[0]

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        seed = self.sampling(n, seed, "samples")
        return self.likelihood.location(self._drawn(self.check_inputs(x), n, seed, "draws"), 1)

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Draws from the process before the data, a ~ N(0, I), under the learned prior."""
        seed = self.sampling(n, seed, "samples")
        return self.likelihood.location(self._drawn(self.check_inputs(x), n, seed, "prior"), 1)

    def _drawn(self, x: Any, n: int, seed: int, purpose: str) -> Tensor:
        """Whole functions at fitted x, [n, N, ...], member by member."""
        counts = [count for count in self.split(n) if count]  # the first members have the most
        who = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(self.device)
        nth = torch.cat([torch.arange(count) for count in counts]).to(self.device)
        keys = [f"{self.ids[k]}/{j}" for k, count in enumerate(counts) for j in range(count)]
        a = Noise(seed, purpose, keys, self.device, self.dtype).normal((self.basis.shape[1],))
        if purpose == "draws":
            a = self.a_mean[who] + (self.a_root[who] @ a.unsqueeze(-1)).squeeze(-1)
        dealt = a.new_zeros(len(counts), max(counts), a.shape[1]).index_put((who, nth), a)
        members = torch.arange(len(counts), device=self.device)
        parts = []
        for piece in self._pieces(x, n):
            mean, phi = self._basis(piece, members)
            away = (dealt @ phi.flatten(2)).unflatten(2, phi.shape[2:])
            parts.append((mean.unsqueeze(1) + away)[who, nth])
        return torch.cat(parts, 1)

    def tensors(self) -> dict[str, Tensor]:
        own = {"point": self._point, "basis": self.basis}
        return super().tensors() | own | {"a_mean": self.a_mean, "a_root": self.a_root}

    def extra(self) -> dict[str, Any]:
        return super().extra() | {"elbo": self.elbo}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> ImplicitProcessPosterior:
        own = {name: tensors[name] for name in ("point", "basis", "a_mean", "a_root")}
        new = cls(**common, **cls._shared(tensors, extra), **own)
        new.elbo = extra.get("elbo")
        return new


_LOOKED_AT_BY = 32  # draws of a that predict held-out rows


@store.register("vip")
@dataclass(frozen=True)
class ImplicitProcess(Method):
    """A variational implicit process.

    Parameters
    ----------
    functions : int
        S, draws of the prior that functions are made of.
    alpha : float
        α of the energy; 0: the ELBO.
    learn_prior : bool
        Fit the prior's means and standard deviations, one per weight. They start at the network's
        first weights, and at `initial_scale` times the width of the model's own prior.
    initial_scale : float
        See `learn_prior`. A value below 1 (for example 0.1) improves predictions near the training
        rows and reduces the uncertainty far from them: docs/functional.md.
    exact : bool
        With Gaussian noise, put the posterior of a in closed form in the place of q(a) at the end:
        what α = 0 comes to, and narrower than what a larger α finds.
    function_prior : ImplicitPrior or None
        A `doxa.ImplicitPrior` in place of the network's functions; the network then only determines
        the outputs, and nothing of the prior is learned.
    samples : int
        Draws of a with which E_q is estimated under a likelihood that is not Gaussian.
    average : float
        The share of the last steps over which what is trained is averaged (Polyak).
    """

    name: ClassVar[str] = "vip"
    default_steps: ClassVar[int] = 4000
    overfits: ClassVar[bool] = True

    functions: int = whole(20, least=2)
    alpha: float = between(0.5, 0, 1)
    learn_prior: bool = flag(True)
    initial_scale: float = positive(1.0, per_run=True)
    exact: bool = flag(False)
    function_prior: ImplicitPrior | None = plain(None, ImplicitPrior, "a doxa.ImplicitPrior")
    samples: int = whole(10, least=1)
    average: float = between(0.25, 0, 1, "[)")

    @property
    def width(self) -> int:
        return self.functions

    @property
    def _over(self) -> tuple[str, ...]:
        learned = ("rho",) if self.learn_prior and self.function_prior is None else ()
        return ("mean", "a_mean", "a_root", *learned)

    def init(self, run: Run) -> State:
        state = run.init_network()
        run.say_frozen(self.name)
        s, index = self.functions, run.subset_index
        theta = state.pop("theta")
        if self.function_prior is not None:
            noise = (
                run.expand_particles(s).noise("functions").normal((self.function_prior.numbers,))
            )
            base = noise.unflatten(0, (-1, s))
        else:
            priors = [run.subset_prior[m] for m in range(run.size)] if run.subset_prior.runs else (
                [run.subset_prior] * run.size
            )  # fmt: skip
            drawn = [
                prior.sample(s, generator("prior functions", *start)).to(theta)
                for prior, start in zip(priors, run.starts, strict=True)
            ]
            base = torch.stack(drawn)  # [M, S, subset]
        rho = torch.zeros_like(theta[:, index])
        if "rho" in self._over:
            rho = rho + run.field(self, "initial_scale").log().unsqueeze(1)
        else:
            theta = theta.index_fill(1, index, 0.0)
        zero = torch.zeros(run.size, s, device=run.device, dtype=run.dtype)
        return {
            **state, "mean": theta, "base": base,
            "rho": rho, "a_mean": zero,
            "a_root": torch.zeros_like(zero).unsqueeze(1).repeat(1, s, 1),
        }  # fmt: skip

    def reads_inputs(self, run: Run) -> bool:
        return True

    def stages(self, run: Run) -> Iterable[Stage]:
        if self.alpha and run.likelihood.tempered:
            raise MethodError("classes with weights have no α-energy: use alpha=0")
        yield optimise(self._energy, run.steps, over=self._over, average=self.average)
        yield from noise_on_held_out(self.score, run, average_name("mean", self.average))

    def _energy(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        mean = params["mean"]
        if "rho" not in self._over:  # the prior's means stay where they are
            index = run.subset_index
            mean = mean.index_copy(1, index, mean[:, index].detach())
        q = {**params, "mean": mean}
        eps = None
        if not run.likelihood.integrates_normal:
            eps = clock.noise(self.samples, self.functions)
        f = self.function_moments(run, q, batch.x, batch.shared)
        each = energies(run, q, f, batch, self.alpha, eps)
        outside = run.prior.log_prob(mean) - run.subset_prior.log_prob(mean[:, run.subset_where])
        return run.total(each, batch) - divergence(q) + outside, {}

    def function_moments(self, run: Run, q: State, x: Any, shared: bool) -> FunctionMoments:
        """The moments of f under q(a) at any inputs."""
        mean, phi = self.basis(run, q, x, shared)
        return FunctionMoments(
            mean + torch.einsum("msbo,ms->mbo", phi, q["a_mean"]),
            torch.einsum("msbo,mst->mtbo", phi, root_of(q["a_root"])),
        )

    def basis(self, run: Run, q: State, x: Any, shared: bool) -> tuple[Tensor, Tensor]:
        """m [M, B, O] and φ [M, S, B, O]."""
        s = self.functions
        if self.function_prior is not None:
            x = x.expand(run.size, *x.shape) if shared else x
            f = self.function_prior.functions(x, q["base"], math.prod(run.net.output))
        else:
            inner = {k: v.repeat_interleave(s, 0) for k, v in network_part(q).items()}
            x = x if shared else tree_map(lambda t: t.repeat_interleave(s, 0), x)
            out = run.expand_particles(s).outputs(
                self.weights(run, q).flatten(0, 1), x, inner, shared
            )
            if not isinstance(out, Tensor):
                raise ModelError("vip takes networks of one head, and this one has several")
            f = out.unflatten(0, (-1, s))
            f = f.flatten(3) if f.ndim > 3 else f.unsqueeze(-1)
        mean = f.mean(1)
        return mean, (f - mean.unsqueeze(1)) / math.sqrt(s)

    def weights(self, run: Run, q: State) -> Tensor:
        """θ_s, [M, S, P]."""
        away = q["rho"].exp().unsqueeze(1) * q["base"]
        return moved(run, q["mean"].unsqueeze(1), away)

    def parameters(self, run: Run, state: State) -> Tensor:
        return averaged(state, "mean")

    def score(self, run: Run, state: State, batch: Batch) -> Tensor:
        """The predictive density of held-out rows, or the mean of its logarithm if classes have
        weights. The mean function alone would have a good score long before q(a) is narrow enough.
        """
        q, eps = self._answer(state), None
        if not run.likelihood.integrates_normal:
            eps = run.noise("held-out").normal((_LOOKED_AT_BY, self.functions))
        f = self.function_moments(run, q, batch.x, batch.shared)
        alpha = 0.0 if run.likelihood.tempered else 1.0
        return run.total(energies(run, q, f, batch, alpha, eps), batch)

    def _answer(self, state: State) -> State:
        return {**state, **{name: averaged(state, name) for name in self._over}}

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        q = self._answer(state)
        gaussian = run.likelihood.integrates_normal
        with torch.no_grad():
            if self.exact and gaussian:
                q |= self._solved(run, q)
            own = self.function_prior is None
            posterior = ImplicitProcessPosterior(
                point=q["mean"], basis=self.weights(run, q) if own else q["base"],
                a_mean=q["a_mean"], a_root=root_of(q["a_root"]),
                **run.common(self), **run.shared(state),
            )  # fmt: skip
            if not self.learn_prior and not run.tempered:
                posterior.elbo = self._elbo(run, q)
        return posterior

    def _solved(self, run: Run, q: State) -> State:
        """The posterior of a given all rows, in closed form, with precision I + Σ_i φ_i φ_iᵀ/σ²."""
        rows = run.passes()
        eye = torch.eye(self.functions, device=run.device, dtype=torch.float64)
        precision, pull = eye.repeat(run.size, 1, 1), eye.new_zeros(run.size, self.functions)
        for t in range(rows.count):
            batch = rows.batch(t)
            mean, phi = self.basis(run, q, batch.x, batch.shared)
            given = run.likelihood_theta(q["mean"])
            noise = run.likelihood.variance(shaped(run, mean), given, lead=1).reshape(mean.shape)
            weight = 1 / noise.double()  # [M, B, O]
            if batch.weight is not None:
                weight = weight * batch.weight.unsqueeze(-1)
            phi, left = phi.double(), batch.y.reshape(*batch.y.shape[: 2 - batch.shared], -1) - mean
            scaled = phi * weight.unsqueeze(1)
            precision = precision + torch.einsum("msbo,mtbo->mst", scaled, phi)
            pull = pull + torch.einsum("msbo,mbo->ms", scaled, left.double())
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        root = torch.linalg.cholesky((covariance + covariance.mT) / 2)
        mean = (covariance @ pull.unsqueeze(-1)).squeeze(-1)
        log = root.diagonal(dim1=-2, dim2=-1).log()
        return {
            "a_mean": mean.to(run.dtype),
            "a_root": (root.tril(-1) + torch.diag_embed(log)).to(run.dtype),
        }

    def _elbo(self, run: Run, q: State) -> float:
        """The bound on the evidence of the moment-matched process, the mean over members."""
        rows, eps = run.passes(), run.noise("elbo").normal((64, self.functions))
        total = -divergence(q).double()
        for t in range(rows.count):
            batch = rows.batch(t)
            f = self.function_moments(run, q, batch.x, batch.shared)
            total += run.total(energies(run, q, f, batch, 0.0, eps), batch).double()
        return float((total + run.units_log_jacobian()).mean())
