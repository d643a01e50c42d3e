"""What the matrix of mistakes is made on: small tables, small networks, and fits of two steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import doxa
from doxa.errors import DoxaError

Row = tuple[Callable[[], Any], type[DoxaError], str]

N, D = 20, 3
NAMES = ["age", "height", "weight"]


def table() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


X, Y = table()
LABELS = torch.arange(N) % 3
FRAME = pd.DataFrame(X.numpy(), columns=NAMES, index=[f"p{i}" for i in range(N)])


def listed(**tables: dict[str, Row]) -> list[Any]:
    """The rows of some tables, as pytest takes them."""
    return [
        pytest.param(mistake, error, f"(?s){words}", id=f"{of}: {name}")
        for of, table in tables.items()
        for name, (mistake, error, words) in table.items()
    ]


def net(outputs: int = 1, inputs: int = D) -> nn.Module:
    return doxa.nets.mlp(inputs, outputs, hidden=(3,))


class After(nn.Module):
    """A layer and any function of its output."""

    def __init__(self, after: Any, outputs: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(D, outputs)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.layer(x))


def fit(network: Any = None, data: Any = None, method: Any = "map", **settings: Any) -> Any:
    """Two steps on all rows of the table, unless told otherwise."""
    if not {"epochs", "steps"} & set(settings):
        settings["steps"] = 2
    settings.setdefault("validation", None)
    data = (X, Y) if data is None else data
    return doxa.fit(net() if network is None else network, data, method, **settings)


def without(value: float, row: int = 7, column: int = 2, of: Tensor = X) -> Tensor:
    """The table with a hole in it."""
    holed = of.clone()
    holed[(row, column) if holed.ndim > 1 else row] = value
    return holed


@cache
def numbers() -> Any:
    return fit(members=2)


@cache
def named() -> Any:
    return fit(data=(FRAME, Y[:, 0]), members=2)


@cache
def classes() -> Any:
    return fit(net(3), (X, LABELS), likelihood="categorical")


@cache
def process() -> Any:
    return doxa.fit(None, (X, Y), doxa.GP(refine=0, noise=0.1), steps=2)


@cache
def exact() -> Any:
    return doxa.fit(None, (X, Y), "linear")


@cache
def chains() -> Any:
    return fit(method=doxa.HMC(draws=4, burn_in=2, leapfrog=2), members=2)


class Endless(IterableDataset[Any]):
    """Rows without end."""

    def __iter__(self) -> Any:
        while True:
            yield X[0], Y[0]


class TooLong(Endless):
    """Says that it ends, and does not."""

    def __len__(self) -> int:
        return N


def loader(data: Any = None, **settings: Any) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(X, Y) if data is None else data, **{"batch_size": 6, **settings}
    )


def noisy_object() -> np.ndarray[Any, Any]:
    return np.array([[None, 1, "two"]] * N, dtype=object)
