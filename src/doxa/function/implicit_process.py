"""Variational implicit processes: a network's prior functions as the basis of a linear model.

    f_s = g(·, θ_s), θ_s = μ + σ ∘ w_s,   s = 1…S,   w_s drawn once from the weight prior
    m = (1/S) Σ f_s,   φ_s = (f_s − m)/√S,   f(x) = m(x) + Σ_s a_s φ_s(x),   a ~ N(0, I)

so that f is the Gaussian process with the draws' mean and covariance. q(a) = N(b, LLᵀ), the
prior's (μ, σ) and the noise ascend the α-energy

    L_α = (1/α) Σ_i log E_q[p(y_i | f_i)^α] − KL(q(a) ‖ N(0, I)),

which is the ELBO as α → 0, and at α = 1 a sum of predictive densities. Ma, Li & Hernández-Lobato
(2019), with α = ½. Under Gaussian noise each term is in closed form, and with `exact` q(a) is at
the end the posterior of a given the prior that was learned: a pass over the data. With other
likelihoods E_q is a mean over `samples` draws of a. The outputs of a network share a.

The noise w_s stays what it was drawn as, so that q(a) speaks of the same functions in every step. S
functions span all that can be believed: as few as 20 have little left to say far from the data,
unless what the prior learned says it. Weights outside the subset, and the likelihood's own
parameters, are points with their prior; (μ, σ) have none (type-II maximum likelihood). Dropout is
off, and BatchNorm stays as it came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa import store
from doxa.data import Batch
from doxa.errors import MethodError, ModelError
from doxa.function.energy import Believed, divergence, energies, root_of, shaped
from doxa.function.implicit_process_posterior import ImplicitProcessPosterior
from doxa.likelihoods import Gaussian
from doxa.method import (
    Clock,
    Method,
    Run,
    Stage,
    State,
    averaged,
    network_part,
    noise_on_held_out,
    optimise,
)
from doxa.method.fields import between, flag, plain, positive, whole
from doxa.model import likelihood_parameters
from doxa.noise import generator
from doxa.posterior import Posterior
from doxa.priors.functions import ImplicitPrior
from doxa.vi.gaussian import moved

_LOOKED_AT_BY = 32  # draws of a that predict held-out rows


@store.register("vip")
@dataclass(frozen=True)
class ImplicitProcess(Method):
    """A variational implicit process.

    Parameters
    ----------
    functions: S, draws of the prior that functions are made of.
    alpha: α of the energy; 0: the ELBO.
    learn_prior: fit the prior's means and standard deviations, one a weight. They start at the
        network's first weights, and at `initial_scale` times the width of the model's own prior.
    initial_scale: see there. Below 1 (0.1, say) rows like those fitted to are predicted better, and
        there is less doubt away from them: docs/functional.md.
    exact: with Gaussian noise, put the posterior of a in closed form in the place of q(a) at the
        end: what α = 0 comes to, and narrower than what a larger α finds.
    function_prior: a `doxa.ImplicitPrior` in place of the network's functions; the network then
        only says which outputs there are, and nothing of the prior is learned.
    samples: draws of a with which E_q is estimated under a likelihood that is not Gaussian.
    average: the share of the last steps over which what is trained is averaged (Polyak).
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
            noise = run.times(s).noise("functions").normal((self.function_prior.numbers,))
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

    def stages(self, run: Run) -> Iterable[Stage]:
        if self.alpha and run.likelihood.tempered:
            raise MethodError("classes with weights have no α-energy: take alpha=0")
        yield optimise(self._energy, run.steps, over=self._over, average=self.average)
        yield from noise_on_held_out(self.score, run, "average.mean" if self.average else "mean")

    def _energy(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        mean = params["mean"]
        if "rho" not in self._over:  # the prior's means stay where they are
            index = run.subset_index
            mean = mean.index_copy(1, index, mean[:, index].detach())
        q = {**params, "mean": mean}
        eps = None
        if not isinstance(run.likelihood, Gaussian):
            eps = clock.noise(self.samples, self.functions)
        f = self.believed(run, q, batch.x, batch.shared)
        each = energies(run, q, f, batch, self.alpha, eps)
        outside = run.prior.log_prob(mean) - run.subset_prior.log_prob(mean[:, run.subset_where])
        return run.total(each, batch) - divergence(q) + outside, {}

    def believed(self, run: Run, q: State, x: Any, shared: bool) -> Believed:
        """f under q(a) at any inputs."""
        mean, phi = self.basis(run, q, x, shared)
        return Believed(
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
            out = run.times(s).outputs(self.weights(run, q).flatten(0, 1), x, inner, shared)
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
        """The predictive density of held-out rows, or its mean logarithm where classes have
        weights. The mean function alone would be good long before q(a) is narrow enough."""
        q, eps = self._answer(state), None
        if not isinstance(run.likelihood, Gaussian):
            eps = run.noise("held-out").normal((_LOOKED_AT_BY, self.functions))
        f = self.believed(run, q, batch.x, batch.shared)
        alpha = 0.0 if run.likelihood.tempered else 1.0
        return run.total(energies(run, q, f, batch, alpha, eps), batch)

    def _answer(self, state: State) -> State:
        return {**state, **{name: averaged(state, name) for name in self._over}}

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        q = self._answer(state)
        gaussian = isinstance(run.likelihood, Gaussian)
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
        """a given all rows, in closed form: precision I + Σ_i φ_i φ_iᵀ/σ²."""
        rows = run.passes()
        eye = torch.eye(self.functions, device=run.device, dtype=torch.float64)
        precision, pull = eye.repeat(run.size, 1, 1), eye.new_zeros(run.size, self.functions)
        for t in range(rows.count):
            batch = rows.batch(t)
            mean, phi = self.basis(run, q, batch.x, batch.shared)
            given = likelihood_parameters(run.layout.unflatten(q["mean"])) | run.constants
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
            f = self.believed(run, q, batch.x, batch.shared)
            total += run.total(energies(run, q, f, batch, 0.0, eps), batch).double()
        return float((total + run.units_log_jacobian()).mean())
