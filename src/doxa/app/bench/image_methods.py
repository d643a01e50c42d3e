"""How each method is run on the image classifiers: settings fixed beforehand, none by test rows.

All methods share one network, one prior, N(0, 1) on every weight, and one optimiser: Adam with a
cosine schedule. `hmc` samples the last layer of the MAP network: its features at the training rows
are computed once, and the chains run on them with all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import doxa
from doxa.app.bench.images import Images
from doxa.errors import MethodError
from doxa.evaluate.density import features
from doxa.predictive import Predictive

REGRESSION_ONLY = tuple(
    sorted(row.name for row in doxa.methods() if "classification" not in row.tasks)
)


@dataclass(frozen=True)
class Settings:
    """Of one table of image classifiers."""

    net: str
    epochs: int
    batch: int = 256
    rate: float = 2e-3
    members: int = 5
    dropout: float = 0.1
    samples: int = 100  # in a prediction, where the method draws them
    chains: int = 4
    burn_in: int = 800
    draws: int = 25  # kept from each chain
    thin: int = 8
    leapfrog: int = 40
    sweep_rows: int = 2000  # test rows that are shifted
    sweep_samples: int = 50
    train_rows: int | None = None
    test_rows: int | None = None

    def build(self, data: Images) -> nn.Module:
        classes = int(data.y.max()) + 1
        return doxa.nets.build(self.net, {"inputs": data.channels, "outputs": classes})


OOD = Settings("lenet5", epochs=20)
CIFAR = Settings(
    "resnet20", epochs=30, batch=128, rate=2e-3, sweep_rows=1000, sweep_samples=20
)  # fmt: skip
_SMALL: dict[str, Any] = {
    "epochs": 2, "batch": 64, "members": 2, "samples": 8, "chains": 2, "burn_in": 40, "draws": 4,
    "leapfrog": 10, "sweep_rows": 100, "sweep_samples": 4, "train_rows": 2000, "test_rows": 200,
}  # fmt: skip


def settings(table: str, scale: str = "full") -> Settings:
    """Of a table, at "full" scale or "small" (under a minute on one core, for tests)."""
    full = {"ood": OOD, "cifar": CIFAR}[table]
    if scale == "full":
        return full
    if scale != "small":
        raise MethodError(f"scale must be 'full' or 'small', not {scale!r}")
    small = replace(full, **_SMALL)
    if table == "cifar":
        small = replace(small, epochs=1, train_rows=300, test_rows=60, sweep_rows=20, samples=4)
    return small


class OnFeatures:
    """A posterior over the last layer, on the features of a network that does not vary."""

    def __init__(self, trunk: doxa.Posterior, head: doxa.Posterior) -> None:
        self.trunk, self.head = trunk, head
        self.base_likelihood = head.base_likelihood
        self.status = head.status

    def predict(
        self, x: Tensor, n: int | None = None, seed: int | None = None, keep: str = "samples"
    ) -> Predictive:
        return self.head.predict(features(self.trunk, x), n, seed, keep)

    def features(self, x: Tensor) -> Tensor:
        return self.trunk.features(x)

    def read(self, x: Any) -> Any:
        return self.trunk.read(x)


@dataclass(frozen=True)
class Protocol:
    """What is done, in words that stand under the table, and the doing. `draws`: predictions are
    of as many samples as the settings say, not of all that were kept."""

    words: str
    fit: Callable[[Images, Settings, int], Any]
    draws: bool = False


def _fit(data: Images, s: Settings, seed: int, method: Any, **options: Any) -> doxa.Posterior:
    model = doxa.Model(s.build(data), "categorical", doxa.Normal(1.0), options.pop("subset", "all"))
    posterior: doxa.Posterior = doxa.fit(
        model, (data.x, data.y), method, seed=seed, device=data.x.device, epochs=s.epochs,
        batch_size=s.batch, lr=s.rate, progress=False, validation=None, **options,
    )  # fmt: skip
    return posterior


def _map(data: Images, s: Settings, seed: int) -> doxa.Posterior:
    return _fit(data, s, seed, "map")


def _deep_ensemble(data: Images, s: Settings, seed: int) -> doxa.Posterior:
    return _fit(data, s, seed, "deep-ensemble", members=s.members)


def _mean_field(data: Images, s: Settings, seed: int) -> doxa.Posterior:
    return _fit(data, s, seed, "mean-field")


def _mc_dropout(data: Images, s: Settings, seed: int) -> doxa.Posterior:
    return _fit(data, s, seed, doxa.MCDropout(p=s.dropout))


def _laplace(data: Images, s: Settings, seed: int) -> doxa.Posterior:
    return _fit(data, s, seed, doxa.Laplace(structure="full"), subset="last_layer")


def _hmc(data: Images, s: Settings, seed: int) -> OnFeatures:
    trunk = _map(data, s, seed)
    z = features(trunk, data.x)
    layer = nn.Linear(z.shape[1], int(data.y.max()) + 1, device=z.device)
    _, (weight, bias) = zip(*list(trunk.draw(1).items())[-2:], strict=True)
    layer.load_state_dict({"weight": weight[0], "bias": bias[0]})
    method = doxa.HMC(draws=s.draws, burn_in=s.burn_in, leapfrog=s.leapfrog, thin=s.thin)
    head = doxa.fit(
        doxa.Model(layer, "categorical", doxa.Normal(1.0)), (z, data.y), method, init="given",
        members=s.chains, seed=seed, device=z.device, progress=False,
    )  # fmt: skip
    return OnFeatures(trunk, head)


PROTOCOLS: dict[str, Protocol] = {
    "map": Protocol("one network", _map),
    "deep-ensemble": Protocol("{members} networks from different starts", _deep_ensemble),
    "mean-field": Protocol("T = 1, all weights, {samples} samples", _mean_field, True),
    "mc-dropout": Protocol(
        "p = {dropout} on the inputs of every layer but the first, {samples} masks",
        _mc_dropout, True,
    ),
    "laplace": Protocol(
        "last layer, full Gauss–Newton, linearised, {samples} samples", _laplace, True
    ),
    "hmc": Protocol(
        "last layer, on the features of the MAP network and all rows: {chains} chains from its "
        "maximum, {burn_in} transitions of {leapfrog} steps, then {draws} kept, one in {thin}",
        _hmc,
    ),
}  # fmt: skip


def find(method: str) -> Protocol:
    """The protocol of a method; the reason where it has none."""
    if method in REGRESSION_ONLY:
        raise MethodError(f"{method} is for regression with Gaussian noise, not for classes")
    if method not in PROTOCOLS:
        raise MethodError(f"no image protocol for {method!r}; there are {', '.join(PROTOCOLS)}")
    return PROTOCOLS[method]


def wait(device: torch.device | str) -> None:
    """Until the device is done, so that a clock tells the truth."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
