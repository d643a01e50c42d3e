"""What the tables of image classifiers share: network, lengths, rates, how many of everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

import doxa
from doxa.app.bench.images import Images
from doxa.errors import MethodError


@dataclass(frozen=True)
class Settings:
    """Of one table of image classifiers."""

    net: str
    epochs: int
    norm: str | None = None  # of the networks that have one to choose
    batch: int = 256
    rate: float = 2e-3
    members: int = 5
    dropout: float = 0.1
    samples: int = 100  # in a prediction, where the method draws them
    chains: int = 4
    burn_in: int = 300
    draws: int = 50  # kept from each chain
    thin: int = 4
    leapfrog: int = 12
    sweep_rows: int = 2000  # test rows that are shifted
    sweep_samples: int = 50
    train_rows: int | None = None
    test_rows: int | None = None
    seeds: int = 1  # fitted side by side
    choose: bool = False  # what mean-field and ivon start with, by the last fifth of the rows

    def build(self, data: Images) -> nn.Module:
        classes = int(data.y.max()) + 1
        if self.net == "mlp":
            return doxa.nets.mlp(data.x.shape[1], classes, hidden=(400, 400))
        chosen = {} if self.norm is None else {"norm": self.norm}
        return doxa.nets.build(self.net, {"inputs": data.channels, "outputs": classes, **chosen})


OOD = Settings("lenet5", epochs=20)
MNIST = Settings("mlp", epochs=60, batch=128, rate=1e-3, dropout=0.5, seeds=3)
CIFAR = Settings(
    "resnet20", epochs=30, batch=128, rate=2e-3, sweep_rows=1000, sweep_samples=20, choose=True
)  # fmt: skip
FRN = replace(
    CIFAR, norm="frn", batch=256, rate=3e-3, samples=30, sweep_rows=500, sweep_samples=10
)  # fmt: skip
REFERENCE = Settings(
    "lenet5", epochs=300, train_rows=2000, burn_in=100, draws=20, thin=3, leapfrog=150
)  # fmt: skip
_TABLES = {"ood": OOD, "mnist": MNIST, "cifar": CIFAR, "cifar-frn": FRN, "reference": REFERENCE}
_SMALL: dict[str, Any] = {
    "epochs": 2, "batch": 64, "members": 2, "samples": 8, "chains": 2, "burn_in": 40, "draws": 4,
    "leapfrog": 10, "sweep_rows": 100, "sweep_samples": 4, "train_rows": 2000, "test_rows": 200,
}  # fmt: skip


def settings(table: str, scale: str = "full") -> Settings:
    """Of a table, at "full" scale or "small" (under a minute on one core, for tests)."""
    full = _TABLES[table]
    if scale == "full":
        return full
    if scale != "small":
        raise MethodError(f"scale must be 'full' or 'small', not {scale!r}")
    small = replace(full, **_SMALL)
    if table == "reference":
        small = replace(small, epochs=20, train_rows=200, burn_in=20)
    if table.startswith("cifar"):
        small = replace(small, epochs=1, train_rows=300, test_rows=60, sweep_rows=20, samples=4)
    return small
