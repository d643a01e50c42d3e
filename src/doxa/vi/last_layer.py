"""Variational inference on the last layer: a full Gaussian over it, features learned with it.

    f(x) = W φ(x) + b,   q(W, b) = N(μ, L Lᵀ)
    Gaussian noise:  E_q log N(y; f, σ²) = log N(y; μ φ̃, σ²) − φ̃ᵀ L Lᵀ φ̃ / 2σ²,   φ̃ = (φ, 1)
    softmax, bound:  E_q log p(y) ≥ μ_y φ̃ − log Σ_k exp(μ_k φ̃ + ½ φ̃ᵀ Σ_kk φ̃)

The expectation under Gaussian noise is exact, so that nothing in the objective is random but the
batch; where the features are fixed this is Bayesian linear regression, found by gradients. Other
likelihoods are averaged over draws of the weights, or, for a softmax, bounded without any (Jensen).
The features are points with their prior, trained on the same bound (`features="joint"`), or left as
they are given ("frozen"). After the Bayesian last layers of Snoek et al. (2015); the bound as in
Harrison, Willes & Snoek (2024). Doubt is linear in the features: far from the data it grows only as
they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from doxa import linalg, store
from doxa.data import Batch
from doxa.errors import MemoryBudgetError, MethodError, ModelError
from doxa.likelihoods import Categorical, Gaussian
from doxa.method import Clock, Problem, Run, Stage, State, of_subset, optimise
from doxa.method.fields import one_of, whole
from doxa.model import likelihood_parameters
from doxa.model.layers import Noisy, Slots, Value, deviation, extended
from doxa.model.problem import Network
from doxa.vi.gaussian import GaussianVI

_MOST = 5000  # weights of a last layer whose covariance is held whole


class Tapped(Noisy):
    """Mixin of layers that also give what they are given: φ."""

    gives = ("features",)

    def forward(self, x: Tensor) -> Tensor:
        self.features = x
        return super().forward(x)  # type: ignore[misc]

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        out, stacked = inner(h, has_axis)
        given = h if has_axis else h.unsqueeze(0).expand(len(out), *h.shape)
        slots.give("features", given)
        return out, stacked


def tapped(layer: nn.Module) -> nn.Module:
    new = extended(layer, Tapped, inner=type(layer))
    new.register_buffer("features", torch.zeros(0))
    return new


@store.register("last-layer-vi")
@dataclass(frozen=True)
class LastLayerVI(GaussianVI):
    """A full Gaussian over the last layer.

    Parameters
    ----------
    features: "joint" trains the layers before on the same bound; "frozen" leaves them as they are
        given (with init="given").
    softmax: how a categorical likelihood is averaged: "sampled" draws of the weights, or a "bound"
        without draws.
    samples: draws a member and step, where there are any. The others are those of every Gaussian
        here: initial_std, temperature, average, elbo_samples.
    """

    name: ClassVar[str] = "last-layer-vi"
    shape: ClassVar[tuple[str, ...]] = ("rho", "lower")

    features: str = one_of("joint", "frozen")
    softmax: str = one_of("sampled", "bound")
    samples: int = whole(4, least=1)

    def prepare(self, problem: Problem) -> Problem:
        """Only the last layer is uncertain, and gives its input."""
        assert isinstance(problem, Network)
        name = problem.model.head
        layer = None if name is None else problem.model.net.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ModelError(
                f"the last layer, {name!r}, is a {type(layer).__name__}: last-layer VI needs a "
                "linear one; low-rank-vi takes any"
            )
        if problem.model.last not in (None, name):
            raise ModelError(
                f"the last layer, {problem.model.last!r}, is frozen (requires_grad=False): "
                "last-layer VI has nothing to learn there; low-rank-vi takes weights anywhere"
            )
        if problem.model.subset not in ("all", "last_layer"):
            raise ModelError("last-layer VI is about the last layer: leave subset= out")
        size = layer.weight.numel() + (0 if layer.bias is None else layer.bias.numel())
        if size > _MOST:
            raise MemoryBudgetError(
                f"the covariance of the {size} weights of {name!r} would take "
                f"{size**2 * layer.weight.element_size() / 2**30:.3g} GiB: at most {_MOST} are "
                "held whole; low-rank-vi with subset='last_layer' takes any number"
            )
        return problem.rewrite(
            lambda path, one: tapped(one) if path == name else None, "last_layer"
        )

    def init_shape(self, run: Run) -> State:
        size = len(run.subset_index)
        std = run.field(self, "initial_std").unsqueeze(1)
        return {
            "rho": std.expm1().log().expand(run.size, size).clone(),
            "lower": run.n.new_zeros(run.size, size, size),
        }

    def factor(self, params: State) -> Tensor:
        """L: its diagonal softplus(ρ), free below, in units of it."""
        std = deviation(params["rho"])
        return std.unsqueeze(2) * params["lower"].tril(-1) + torch.diag_embed(std)

    def numbers(self, params: State) -> int:
        return params["rho"].shape[1]

    def away(self, params: State, eps: Tensor) -> Tensor:
        return eps @ self.factor(params).mT

    def variances(self, params: State) -> Tensor:
        return self.factor(params).square().sum(2)

    def logdet(self, params: State) -> Tensor:
        return 2 * deviation(params["rho"]).log().sum(1)

    def covariance(self, params: State) -> linalg.Structure:
        return linalg.Dense(self.factor(params), of_precision=False)

    def stages(self, run: Run) -> Iterable[Stage]:
        first, *others = super().stages(run)
        if self.features == "frozen":
            if run.settings.fresh:
                raise MethodError(
                    "features='frozen' leaves the layers before the last as they are: it needs a "
                    "trained network and init='given'"
                )
            over = ("mean", *self.shape)
            own = of_subset(self._elbo, "mean")
            first = optimise(own, run.steps, over=over, average=self.average)
        yield first
        yield from others

    def expected_log_likelihood(
        self, run: Run, params: State, batch: Batch, clock: Clock
    ) -> tuple[Tensor, State, Tensor]:
        if not (isinstance(run.likelihood, Gaussian) or self._bounded(run)):
            return super().expected_log_likelihood(run, params, batch, clock)
        mean = params["mean"]
        fit = run.train(mean, params, batch, None)
        features = fit.terms[_under(run.net.head, "features")]  # [M, B, ..., d]
        variance = self._variance(run, params, features)
        if isinstance(run.likelihood, Gaussian):
            given = likelihood_parameters(run.layout.unflatten(mean)) | dict(run.constants)
            noise = given["log_noise"].reshape(run.size, *(1,) * (variance.ndim - 2), -1)
            lost = 0.5 * (variance * (-2 * noise).exp()).flatten(2).sum(2)  # [M, B]
        else:
            lost = lost_to_softmax(_logits(run, mean, features), variance)
        if batch.weight is not None:
            lost = lost * batch.weight
        return fit.value - lost.sum(1) * batch.scale, fit.changed, mean.unsqueeze(1)

    def _bounded(self, run: Run) -> bool:
        likelihood = run.likelihood
        plain = isinstance(likelihood, Categorical) and len(run.net.output) == 1
        return self.softmax == "bound" and plain and likelihood == Categorical()

    def _variance(self, run: Run, params: State, features: Tensor) -> Tensor:
        """φ̃ᵀ Σ_kk φ̃ of each row and output, [M, B, ..., K]."""
        factor = self.factor(params)
        layer = run.net.net.get_submodule(run.net.head or "")
        assert isinstance(layer, nn.Linear)
        rows = features.flatten(1, -2)  # [M, rows, d]
        first = layer.weight.numel()
        weights, biases = factor[:, :first], factor[:, first:]
        each = weights.unflatten(1, layer.weight.shape)  # [M, K, d, n]
        half = torch.einsum("mrd,mkdn->mrkn", rows, each)
        if layer.bias is not None:
            half = half + biases.unsqueeze(1)
        return half.square().sum(3).reshape(*features.shape[:-1], -1)


def lost_to_softmax(mean: Tensor, variance: Tensor) -> Tensor:
    """log E Σ_k exp f_k − log Σ_k exp m_k of normal logits, [M, B]: what Jensen's bound takes."""
    return torch.logsumexp(mean + 0.5 * variance, 2) - torch.logsumexp(mean, 2)


def _logits(run: Run, mean: Tensor, features: Tensor) -> Tensor:
    """Of the mean weights, [M, B, K]."""
    weights, head = run.layout.unflatten(mean), run.net.head
    logits = features @ weights[_under(head, "weight")].mT
    bias = weights.get(_under(head, "bias"))
    return logits if bias is None else logits + bias.unsqueeze(1)


def _under(layer: str | None, name: str) -> str:
    return f"{layer}.{name}" if layer else name
