"""Multiplicative normalising flows: Gaussian weights whose means share noise of any shape.

    q(W, z) = q(z) Π N(w_ij; z_i μ_ij, σ_ij²),   z = flow(z₀),   z₀ ~ N(m, s²)
    ELBO = E_q[Σ_i log p(y_i | W) − KL(q(W | z) ‖ p(W)) − log q(z) + log r(z | W)]

Louizos & Welling (2017). All weights that leave one input (of a linear layer) or enter one output
channel (of a convolution) are multiplied by the same z, so that they are correlated, and a marginal
may have several modes; mean-field is the case of a fixed z. The density of q(W) = ∫ q(W, z) dz is
unknown, so r approximates q(z | W): the bound is lower by KL(q(z | W) ‖ r(z | W)). The KL given z
is exact under a Gaussian prior; under another prior, log p is averaged over one draw. The layers,
and their differences from the paper, are in `doxa.model.multiplicative`.

The log-likelihood is averaged over draws of W given z, separate for each row. Each layer uses the
noise that is exact for it: on the outputs where it has one output vector per row, else on the
weights, with signs for each row. All positions of a row then share one W, as in prediction.

Linear and convolutional layers of the subset are uncertain. Other weights, and the parameters of
the likelihood, are point estimates with their prior; the reported bound is conditional on them.
Dropout is off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data import Batch
from doxa.errors import ModelError
from doxa.linalg.layout import Params
from doxa.method import (
    Clock,
    Method,
    Problem,
    Run,
    Stage,
    State,
    average_name,
    averaged,
    noise_on_held_out,
    optimise,
)
from doxa.method.method import Alternatives, between, positive, whole
from doxa.model.layers import MaskedDropout, deviation
from doxa.model.model import Network
from doxa.model.multiplicative import Multiplicative, with_multiplicative
from doxa.model.rank_one import SCALED
from doxa.model.spread import exact_noise
from doxa.posterior import ImplicitPosterior, Posterior
from doxa.priors import BoundPrior, FanInNormal
from doxa.vi.estimators import alone, check_calls, layer_noise
from doxa.vi.gaussian import entropy, moved

log = logging.getLogger("doxa")


@store.register("mnf")
@dataclass(frozen=True)
class MNF(Method):
    """Gaussian weights whose means are multiplied by a flow's noise.

    Parameters
    ----------
    flow_length : int
        Couplings in the flow of q, and in that of r; 0: z is Gaussian, and so is r.
    flow_width : int
        Hidden units of a coupling.
    initial_std : float
        The standard deviation each weight starts with.
    initial_z_std : float
        The standard deviation that z starts with, around 1.
    temperature : float
        T in E_q[−log joint] − T·H[q]; below 1 the posterior is colder (and narrower).
    average : float
        The share of the last steps over which q is averaged (Polyak); 0: the last iterate.
    elbo_samples : int
        Passes over the rows with which the final ELBO is estimated.
    """

    name: ClassVar[str] = "mnf"
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    half_precision: ClassVar[bool] = True
    default_steps: ClassVar[int] = 4000
    overfits: ClassVar[bool] = True
    alternatives: ClassVar[Alternatives] = Alternatives(FanInNormal(10.0), 3.0)
    shrinks: ClassVar[bool] = True

    flow_length: int = whole(2, least=0)
    flow_width: int = whole(16, least=1)
    initial_std: float = positive(0.05)
    initial_z_std: float = positive(0.1)
    temperature: float = positive(1.0, per_run=True)
    average: float = between(0.25, 0, 1, "[)")
    elbo_samples: int = whole(8, least=1)

    def prepare(self, problem: Problem) -> Problem:
        assert isinstance(problem, Network)
        uncertain = problem.net.subset_names
        layers = dict(problem.net.net.named_modules())
        taken = {
            name for name, layer in layers.items()
            if type(layer) in SCALED and _of(name, "weight") in uncertain and alone(layer, layers)
        }  # fmt: skip
        if not taken:
            raise ModelError(
                "the network, or its subset, has no linear or convolutional layer whose weight is "
                "its own: nothing would be uncertain"
            )
        initial = self.initial_std, self.initial_z_std

        def rule(name: str, layer: nn.Module) -> nn.Module | None:
            if isinstance(layer, MaskedDropout):
                return nn.Identity()
            if name not in taken:
                return None
            bias = _of(name, "bias") in uncertain
            rows = exact_noise(problem.net, name) or "weights"
            return with_multiplicative(
                layer, bias, self.flow_length, self.flow_width, initial, rows
            )

        spread = {_of(name, leaf) for name in taken for leaf in ("weight", "bias")}
        points = [name for name in uncertain if name not in spread]
        if not points:
            return problem.rewrite(rule)
        log.warning("mnf: no flow for %s, which stay points on the bound", ", ".join(points))
        return problem.rewrite(rule, tuple(name for name in uncertain if name in spread))

    def stages(self, run: Run) -> Iterable[Stage]:
        layers = [path for path, layer in run.net.net.named_modules()
                  if isinstance(layer, Multiplicative)]  # fmt: skip
        check_calls(run, layers, "leave it out of subset=")
        yield optimise(self._elbo, run.steps, over=("theta", "layers"), average=self.average)
        yield from noise_on_held_out(self.score, run, average_name("theta", self.average))

    def _elbo(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        fit = run.train(params["theta"], params, batch, None, **layer_noise(run, batch, clock))
        theta, std, log_ratio = given_z(run, params, fit.terms)
        every = moved(run, torch.zeros_like(theta), std)  # 0 where a weight is a point
        prior = expected_log_prior(run.prior, theta, every, clock)
        freedom = entropy(std) - log_ratio
        return fit.value + prior + run.field(self, "temperature") * freedom, fit.changed

    def parameters(self, run: Run, state: State) -> Tensor:
        return averaged(state, "theta")

    def score(self, run: Run, state: State, batch: Batch) -> Tensor:
        """At the mean of the weights given z, and z at the flow of its mean."""
        own = {**state, "layers": averaged(state, "layers")}
        return run.log_likelihood(self.parameters(run, state), batch, own)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        at = {**state, "theta": averaged(state, "theta"), "layers": averaged(state, "layers")}
        posterior = ImplicitPosterior(theta=at["theta"], **run.common(self), **run.shared(at))
        heated = bool((run.field(self, "temperature") != 1.0).any())
        if not heated and not run.tempered:
            posterior.elbo = self._final_elbo(run, at)
        return posterior

    def _final_elbo(self, run: Run, state: State) -> float:
        """The bound for the final q, over all rows, with new draws; the mean over members. It is
        conditional on point estimates, which have neither prior nor entropy in it, as in an
        evidence."""
        rows, noise, prior = run.passes(), run.noise("elbo"), run.subset_prior
        total = torch.zeros(run.size, device=run.device, dtype=torch.float64)
        steps = self.elbo_samples * rows.count
        with torch.no_grad():
            for t in range(steps):
                at = torch.tensor(t, device=run.device)
                clock, batch = Clock(at, at, steps, noise), rows.batch(t % rows.count)
                drawn = layer_noise(run, batch, clock)
                fit = run.train(state["theta"], state, batch, None, **drawn)
                theta, std, log_ratio = given_z(run, state, fit.terms)
                own = theta[:, run.subset_where]
                inside = expected_log_prior(prior, own, std, clock)
                total += (fit.value + (inside + entropy(std) - log_ratio) / rows.count).double()
        return float((total / self.elbo_samples + run.units_log_jacobian()).mean())


def expected_log_prior(prior: BoundPrior, mean: Tensor, std: Tensor, clock: Clock) -> Tensor:
    """E log p(W) over independent normals, [M]: exact for a normal prior, else by one draw."""
    if prior.precision is None:
        return prior.log_prob(mean + std * clock.noise(std.shape[1]))
    return prior.log_prob(mean) - 0.5 * (std.square() * prior.precision).sum(1)


def given_z(run: Run, params: State, terms: Params) -> tuple[Tensor, Tensor, Tensor]:
    """q(W | z) for the z of the layers: the means [M, P], which for points are the weights
    themselves, and the deviations [M, subset]; and Σ log q(z) − log r(z | W), [M]."""
    weights = run.layout.unflatten(params["theta"])
    own = run.net.layers.unflatten(params["layers"])
    log_ratio = torch.zeros_like(params["theta"][:, 0])
    for name, z in terms.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "z":
            weight = weights[_of(path, "weight")]  # [M, outputs, inputs, ...]
            axes = (1,) * (weight.ndim - 2)
            wide = z.unsqueeze(1) if weight.ndim == 3 else z.reshape(*z.shape, *axes)
            weights[_of(path, "weight")] = weight * wide
        else:
            log_ratio = log_ratio + terms[name]
    stds = []
    for name in run.net.subset_names:
        path, _, leaf = name.rpartition(".")
        rho = own[_of(path, "rho" if leaf == "weight" else "rho_bias")]
        stds.append(deviation(rho).flatten(1))
    theta = run.layout.flatten(weights)
    return theta, torch.cat(stds, 1), log_ratio


def _of(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
