"""Rank-1 Bayesian networks: point weights, and normal rank-one factors in every layer.

    W ∘ (r sᵀ),   q(r, s) = (1/K) Σ_k N(r; r̄_k, σ_k²) N(s; s̄_k, τ_k²),   p(r), p(s): around 1
    objective = log p(W) + (1/K) Σ_k {E_qk[Σ_i log p(y_i | W, r, s)] − KL(q_k ‖ p)}

Dusenberry et al. (2020). The uncertain parameters are one entry for each input and output of a
layer, which costs little memory. Each row has separate noise, which multiplies activations and
costs little time. KL and log-likelihood are sums. KL is convex, so its mean over components is at
least the KL of the mixture. Without log p(W) this is a bound on the evidence of the factors given
W: `elbo`, after fitting W. A step splits its batch into K parts, one per component. Biases, and
weights of other than linear and convolutional layers, are points too. BatchNorm has statistics for
each component. Noise is the same at all positions of an image or a sequence; prediction uses one
draw per function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.method import Clock, Run, State, flatten_particles, network_part
from doxa.method.components import Components
from doxa.method.method import between, one_of, positive, whole
from doxa.model.layers import deviation
from doxa.posterior import ImplicitPosterior, Posterior
from doxa.vi import kl
from doxa.vi.gaussian import LOG_2PI_E, entropy


@store.register("rank1")
@dataclass(frozen=True)
class Rank1(Components):
    """Normal rank-one factors over point weights.

    Parameters
    ----------
    components : int
        K, the components of the mixture.
    factor_prior : str
        Of the factors, around one: "normal", or "cauchy", which allows large values.
    prior_std : float
        Its standard deviation; of a Cauchy prior, its scale.
    initial_factor_std : float
        The standard deviation of the components' initial means around one; 0: random signs.
    initial_std : float
        The standard deviation each factor starts with.
    temperature : float
        T in E_q[−log joint] − T·H[q]; below 1 the factors are narrower.
    elbo_samples : int
        Draws per row with which the final ELBO is estimated.
    """

    name: ClassVar[str] = "rank1"
    default_steps: ClassVar[int] = 4000
    factor_prior: str = one_of("normal", "cauchy")
    prior_std: float = positive(0.3, per_run=True)
    initial_factor_std: float = between(0.3, 0, 10, "[]")
    initial_std: float = positive(0.05)
    temperature: float = positive(1.0, per_run=True)
    elbo_samples: int = whole(8, least=1)

    @property
    def factor_std(self) -> float:
        return self.initial_std

    def objective(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        value, changed = self.trained(run, params, batch, clock)
        mean, std = _factors(run, params["layers"])  # [M, K, F]
        eps = clock.noise(*mean.shape[1:]) if self.factor_prior == "cauchy" else None
        away = self._divergence(run, mean, std, eps)
        heat = (run.field(self, "temperature") - 1).unsqueeze(1)
        bound = value + (heat * entropy(std) - away).mean(1)
        return bound, changed, run.known_prior(params["theta"])

    def _divergence(self, run: Run, mean: Tensor, std: Tensor, eps: Tensor | None) -> Tensor:
        """KL(q_k ‖ p) of all factors, [M, K]; exact, or at one draw for a Cauchy prior."""
        scale = run.field(self, "prior_std").reshape(-1, 1, 1)
        if eps is None:
            return kl.gaussian(mean, std, 1.0, scale)
        return cauchy_divergence(mean, std, scale, eps)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        posterior = ImplicitPosterior(
            theta=state["theta"],
            components=self.components,
            **run.common(self),
            **run.shared(state),
        )
        heated = bool((run.field(self, "temperature") != 1.0).any())
        if not heated and not run.tempered:
            posterior.elbo = self._final_elbo(run, state)
        return posterior

    def _final_elbo(self, run: Run, state: State) -> float:
        """The bound for the final q, over all rows and components; the mean over members. It is
        conditional on the weights, whose prior is not included."""
        k, many = self.components, run.expand_particles(self.components)
        theta, inner = (
            state["theta"].repeat_interleave(k, 0),
            flatten_particles(network_part(state), k),
        )
        rows, noise = many.passes(), many.noise("elbo")
        total = torch.zeros(run.size * k, device=run.device, dtype=torch.float64)
        with torch.no_grad():
            for t in range(self.elbo_samples * rows.count):
                at = torch.tensor(t, device=run.device)
                clock = Clock(at, at, self.elbo_samples * rows.count, noise)
                batch = rows.batch(t % rows.count)
                total += many.masked_log_likelihood(theta, inner, batch, clock).double()
            away = self._final_divergence(run, state)
        each = total.unflatten(0, (-1, k)) / self.elbo_samples - away
        return float((each.mean(1) + run.units_log_jacobian()).mean())

    def _final_divergence(self, run: Run, state: State) -> Tensor:
        """KL(q_k ‖ p), [M, K]; of a Cauchy prior the mean over a thousand draws."""
        mean, std = _factors(run, state["layers"])
        if self.factor_prior == "normal":
            return self._divergence(run, mean, std, None).double()
        noise = run.noise("divergence")
        total = torch.zeros(run.size, self.components, device=run.device, dtype=torch.float64)
        for t in range(1000):
            total += self._divergence(run, mean, std, noise.normal(mean.shape[1:], t)).double()
        return total / 1000


def cauchy_divergence(mean: Tensor, std: Tensor, scale: Tensor, eps: Tensor) -> Tensor:
    """−H[q] − log p(v) at the draw v = mean + std ε, summed over the last axis: its expectation is
    KL(N(mean, std²) ‖ Cauchy(1, scale))."""
    away = (mean + std * eps - 1) / scale
    log_p = -(math.pi * scale).log() - away.square().log1p()
    return (-std.log() - 0.5 * LOG_2PI_E - log_p).sum(-1)


def _factors(run: Run, layers: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of all factors, from [M, K, Q]: [M, K, F] each."""
    own = run.net.layers.unflatten(layers)
    rho = [value for name, value in own.items() if name.endswith("_rho")]
    mean = [own[name.removesuffix("_rho")] for name in own if name.endswith("_rho")]
    return torch.cat(mean, -1), deviation(torch.cat(rho, -1))
