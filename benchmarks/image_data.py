"""What the image tables share: the images, the settings of each table, and a clock.

All images are float32 [N, C, H, W] from 0 to 1, on the device that is asked for. Training rows are
the first ones of the set, test rows likewise: a smaller scale uses a part of the same data.
`Images` also holds the out-of-distribution sets that a network is tested on.

This module measures nothing by itself; the tables are made by `python -m benchmarks.images`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import DataError, MethodError

PATCH = 32  # the side of a CIFAR image
OUTSIDE = {
    "mnist": ("fashion_mnist", "kmnist", "notmnist"),
    "fashion_mnist": ("mnist", "kmnist", "notmnist"),
    "cifar10": ("camvid",),
}
_FILES = {
    "mnist": "mnist.npz",
    "fashion_mnist": "fashion_mnist.npz",
    "kmnist": "kmnist_test.npz",
    "notmnist": "notmnist_test.npz",
    "cifar10": "cifar10_subset.npz",
    "camvid": "camvid.npz",
}


@dataclass(frozen=True)
class Images:
    """A classification task, and out-of-distribution sets to tell from it."""

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    outside: dict[str, Tensor] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        return self.x.shape[1]


def load_images(
    folder: str | Path,
    name: str,
    train_rows: int | None = None,
    test_rows: int | None = None,
    device: Any = "cpu",
    outside: bool = True,
) -> Images:
    """A set, with its out-of-distribution sets unless `outside` is False, so many rows of each."""
    if name not in OUTSIDE:
        raise DataError(f"no image set {name!r}; there are {', '.join(OUTSIDE)}")
    with open_set(folder, name) as stored:
        x, x_test = to_pixels(stored["x_train"][:train_rows]), to_pixels(stored["x_test"])
        y, y_test = (torch.tensor(stored[f"y_{part}"]).long() for part in ("train", "test"))
    if name == "cifar10":  # stored class by class: mixed, so that a part has every class
        x_test, y_test = _mixed(x_test, y_test)
        if train_rows is not None:
            with open_set(folder, name) as stored:
                x, y = _mixed(to_pixels(stored["x_train"]), y)
            x = x[:train_rows]
    others = {
        other: load_outside(folder, other)[:test_rows].to(device)
        for other in (OUTSIDE[name] if outside else ())
    }
    return Images(
        name, x.to(device), y[: len(x)].to(device), x_test[:test_rows].to(device),
        y_test[:test_rows].to(device), others,
    )  # fmt: skip


def load_outside(folder: str | Path, name: str) -> Tensor:
    """The test images of a set that is not trained on; CamVid's are cut into CIFAR's size."""
    with open_set(folder, name) as stored:
        x = to_pixels(stored["x_test"])
    return patches(x) if name == "camvid" else x


def patches(x: Tensor, side: int = PATCH) -> Tensor:
    """Images cut into squares that do not overlap; what is left at the edges is dropped."""
    count, channels = x.shape[:2]
    rows, columns = x.shape[2] // side, x.shape[3] // side
    x = x[:, :, : rows * side, : columns * side]
    x = x.reshape(count, channels, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(-1, channels, side, side)


def open_set(folder: str | Path, name: str) -> Any:
    """The arrays of a set."""
    path = Path(folder) / _FILES[name]
    if not path.exists():
        raise DataError(f"{path} is not there: the image tables need it")
    return np.load(path, allow_pickle=False)


def to_pixels(images: np.ndarray[Any, Any]) -> Tensor:
    """Bytes [N, H, W] or [N, H, W, C] as numbers [N, C, H, W]."""
    x = torch.from_numpy(images.astype(np.float32) / 255.0)
    return x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()


def _mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """In a fixed random order."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    return x[order], y[order]


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


@cache
def warm_up(device: str) -> None:
    """A short fit before the clock starts: the first one on a GPU pays for its libraries."""
    if torch.device(device).type == "cuda":
        short_fit(device)


def short_fit(device: str) -> None:
    x, y = torch.zeros(64, 1, 28, 28, device=device), torch.arange(64, device=device) % 10
    doxa.fit(
        doxa.nets.lenet5(), (x, y), "map", likelihood="categorical", device=device, steps=50,
        validation=None, progress=False,
    )  # fmt: skip
    wait(device)


def wait(device: torch.device | str) -> None:
    """Until the device is done, so that a clock reads the whole time."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
