"""The posterior of the last layer, sampled: a reference for what approximates it.

Features of the MAP network at the training rows are computed once, and the chains run on them with
all rows, in double precision. On the weights themselves they do not meet in a thousand transitions
(R-hat 5 on Fashion-MNIST): directions differ a thousandfold in width. So they move in coordinates

    θ = μ + L u,   L Lᵀ the covariance of a full Laplace approximation at the maximum μ,

in which the posterior, a log-concave one, is nearly N(0, I). `closeness_to` fits approximations to
the same features and says how far their predictions lie from the chains'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import doxa
from doxa.evaluate.closeness import agreement, total_variation
from doxa.evaluate.ood import features
from doxa.likelihoods import Categorical
from doxa.posterior import Status
from doxa.predictive import Predictive

PRIOR = 1.0  # the standard deviation of every weight, as in all image tables
# What is compared with the chains, on the same features.
HEADS: dict[str, Any] = {
    "laplace": doxa.Laplace(structure="full", train=False, centre="mode"),
    "laplace-polished": doxa.Laplace(structure="full", train=False, polish=10, centre="mode"),
    "laplace-probit": doxa.Laplace(structure="full", link="probit", train=False, centre="mode"),
    "laplace-bridge": doxa.Laplace(structure="full", link="bridge", train=False, centre="mode"),
    "laplace-last-kronecker": doxa.Laplace(structure="kronecker", train=False, centre="mode"),
    "laplace-last-diagonal": doxa.Laplace(structure="diagonal", train=False, centre="mode"),
}


@dataclass(frozen=True)
class OnFeatures:
    """Draws of the last layer, on the features of a network that does not vary."""

    trunk: doxa.Posterior
    layer: nn.Linear  # the trunk's own
    weight: Tensor  # [S, classes, features]
    bias: Tensor  # [S, classes]
    status: Status
    base_likelihood = Categorical()

    def predict(
        self, x: Tensor, n: int | None = None, seed: int | None = None, keep: str = "samples"
    ) -> Predictive:
        z = features(self.trunk, x)
        f = torch.einsum("nd,scd->snc", z.to(self.weight), self.weight) + self.bias.unsqueeze(1)
        return Predictive(f, self.base_likelihood)

    def features(self, x: Tensor) -> Tensor:
        return self.trunk.features(x)

    def read(self, x: Any) -> Any:
        return self.trunk.read(x)


def last_layer_of(trunk: doxa.Posterior, classes: int) -> nn.Linear:
    """The last layer of a fitted network of one member, whose last layer is linear."""
    _, (weight, bias) = zip(*list(trunk.draw(1).items())[-2:], strict=True)
    layer = nn.Linear(weight.shape[2], classes, device=weight.device)
    layer.load_state_dict({"weight": weight[0], "bias": bias[0]})
    return layer


def head(layer: nn.Linear, z: Tensor, y: Tensor, method: Any, seed: int = 0) -> Any:
    """A posterior of the layer, from its weights, on features."""
    model = doxa.Model(layer, "categorical", doxa.Normal(PRIOR))
    return doxa.fit(
        model, (z, y), method, init="given", seed=seed, device=z.device, dtype=z.dtype,
        validation=None, progress=False,
    )  # fmt: skip


def sample_last_layer(
    trunk: doxa.Posterior, x: Tensor, y: Tensor, method: doxa.HMC, chains: int, seed: int
) -> OnFeatures:
    """Chains on the last layer of a fitted network, at its training rows."""
    z = features(trunk, x).double()
    layer = last_layer_of(trunk, int(y.max()) + 1)
    exact = doxa.Laplace(structure="full", train=False, polish=10, centre="mode")
    approximate = head(layer.double(), z, y, exact, seed)
    mean = approximate.mean[0]  # [P]
    root = torch.linalg.cholesky(approximate.covariance.dense()[0])
    classes, width = layer.weight.shape
    cut = classes * width

    def weights(u: Tensor) -> tuple[Tensor, Tensor]:
        theta = mean + u @ root.T
        return theta[..., :cut].unflatten(-1, (classes, width)), theta[..., cut:]

    def log_joint(at: dict[str, Tensor]) -> Tensor:
        weight, bias = weights(at["u"])
        logits = z @ weight.T + bias
        data = -nn.functional.cross_entropy(logits, y, reduction="sum")
        return data - 0.5 * (weight.square().sum() + bias.square().sum()) / PRIOR**2

    draws = doxa.sample(
        log_joint, {"u": torch.zeros_like(mean)}, method, chains, seed=seed, progress=False
    )
    weight, bias = weights(draws["u"].flatten(0, 1))
    return OnFeatures(trunk, layer, weight, bias, draws.status)


def closeness_to(
    reference: OnFeatures, x: Tensor, y: Tensor, x_test: Tensor, samples: int, rows: int
) -> dict[str, dict[str, float]]:
    """{row: agreement with the chains, and total variation}, at some test rows."""
    z = features(reference.trunk, x).double()
    z_test = features(reference.trunk, x_test[:rows]).double()
    wanted = reference.predict(x_test[:rows])
    found = {"map": reference.trunk.predict(x_test[:rows])}
    for name, method in HEADS.items():
        found[name] = head(reference.layer, z, y, method).predict(z_test, samples)
    return {
        name: {"agreement": agreement(p, wanted), "total_variation": total_variation(p, wanted)}
        for name, p in found.items()
    }
