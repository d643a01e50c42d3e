"""Class probabilities in closed form, averaged over functions without drawing any.

Each of K members gives the probabilities of one row, averaged over its functions (`Averaged`), or a
Dirichlet over them (`Dirichlets`), with which the uncertainty splits in closed form:

    m = α/α₀,    Var[p] = m (1 − m)/(α₀ + 1),    E H[p] = ψ(α₀ + 1) − Σ_c m_c ψ(α_c + 1)

The members are mixed. Labels of one row are independent given the member.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.errors import Unavailable
from doxa.likelihoods import Bernoulli, Likelihood
from doxa.predictive.form import Form, mix
from doxa.predictive.mixture import Mixture


class _NotDrawn(Mixture):
    """Logits [K, N, *output] of each member's averaged probabilities."""

    def __init__(self, likelihood: Likelihood, logits: Tensor) -> None:
        weights = logits.new_full((len(logits),), 1.0 / len(logits))
        super().__init__(likelihood.untempered(), logits, {}, weights, None)

    @property
    def samples(self) -> Tensor:
        raise self.unavailable("samples")

    def votes(self) -> Tensor:
        raise self.unavailable("votes")

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super().unavailable(
            quantity,
            instead
            or "its probabilities are averaged over the functions in closed form; draw functions "
            "with posterior.functions(x, n), or predict with link='odds'",
        )


class Averaged(_NotDrawn):
    """Averages alone, in which what the functions disagree about cannot be told from noise."""

    @property
    def splits(self) -> bool:
        return False

    aleatoric = Form.aleatoric  # not available, whatever a mixture has
    epistemic = Form.epistemic
    expected_entropy = Form.expected_entropy

    @property
    def mutual_information(self) -> Tensor:
        raise self.unavailable("mutual_information")


class Dirichlets(_NotDrawn):
    """Concentrations α [K, N, C, *site], all positive; [K, N, 2, *event] for Bernoulli, which has
    no and yes."""

    def __init__(self, likelihood: Likelihood, concentration: Tensor) -> None:
        self.concentration = concentration
        binary = isinstance(likelihood, Bernoulli)
        alpha = concentration.log()
        super().__init__(likelihood, alpha[:, :, 1] - alpha[:, :, 0] if binary else alpha)
        self._total = concentration.sum(2, keepdim=not binary)  # α₀, in a shape like the mean's

    @property
    def aleatoric(self) -> Tensor:
        return mix(self._spread() * self._total / (self._total + 1.0), self.weights)

    @property
    def epistemic(self) -> Tensor:
        within = self._spread() / (self._total + 1.0)
        return mix(within + (self._means() - self.mean).square(), self.weights)

    def _spread(self) -> Tensor:
        """m (1 − m) of each member, [K, N, ...]."""
        return self.likelihood.variance(self.f, {}, 1)

    @property
    def expected_entropy(self) -> Tensor:
        alpha, total = self.concentration, self.concentration.sum(2, keepdim=True)
        own = (alpha / total * torch.special.digamma(alpha + 1.0)).sum(2)
        return mix(torch.special.digamma(total + 1.0).squeeze(2) - own, self.weights)
