"""Images for the tables: what a network is trained on, and what it is shown that it never saw.

All come as float32 [N, C, H, W] from 0 to 1, on the device that is asked for. Training rows are the
first ones of the set, test rows likewise: a smaller scale sees a part of the same data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.errors import DataError

PATCH = 32  # the side of a CIFAR image
STRANGERS = {
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
    """A classification task, and other sets to tell from it."""

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    strangers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class Scenes:
    """CamVid: street scenes [N, 3, 72, 96] and a class for every pixel [N, 72, 96]."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]


def load_images(
    folder: str | Path,
    name: str,
    train_rows: int | None = None,
    test_rows: int | None = None,
    device: Any = "cpu",
    strangers: bool = True,
) -> Images:
    """A set, with its strangers unless told otherwise, as many rows of each as asked for."""
    if name not in STRANGERS:
        raise DataError(f"no image set {name!r}; there are {', '.join(STRANGERS)}")
    with _opened(folder, name) as stored:
        x, x_test = _pixels(stored["x_train"][:train_rows]), _pixels(stored["x_test"])
        y, y_test = (torch.tensor(stored[f"y_{part}"]).long() for part in ("train", "test"))
    if name == "cifar10":  # stored class by class: mixed, so that a part has every class
        x_test, y_test = _mixed(x_test, y_test)
        if train_rows is not None:
            with _opened(folder, name) as stored:
                x, y = _mixed(_pixels(stored["x_train"]), y)
            x = x[:train_rows]
    others = {
        other: stranger(folder, other)[:test_rows].to(device)
        for other in (STRANGERS[name] if strangers else ())
    }
    return Images(
        name, x.to(device), y[: len(x)].to(device), x_test[:test_rows].to(device),
        y_test[:test_rows].to(device), others,
    )  # fmt: skip


def stranger(folder: str | Path, name: str) -> Tensor:
    """The test images of a set that is not trained on; CamVid's are cut into CIFAR's size."""
    with _opened(folder, name) as stored:
        x = _pixels(stored["x_test"])
    return patches(x) if name == "camvid" else x


def patches(x: Tensor, side: int = PATCH) -> Tensor:
    """Images cut into squares that do not overlap; what is left at the edges is dropped."""
    count, channels = x.shape[:2]
    rows, columns = x.shape[2] // side, x.shape[3] // side
    x = x[:, :, : rows * side, : columns * side]
    x = x.reshape(count, channels, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(-1, channels, side, side)


def load_scenes(
    folder: str | Path,
    train_rows: int | None = None,
    test_rows: int | None = None,
    device: Any = "cpu",
) -> Scenes:
    """Evenly spaced frames where not all are asked for: neighbours look alike."""
    with _opened(folder, "camvid") as stored:
        parts = {}
        for part, rows in (("train", train_rows), ("test", test_rows)):
            chosen = _spread(len(stored[f"x_{part}"]), rows)
            parts[f"x_{part}"] = _pixels(stored[f"x_{part}"][chosen]).to(device)
            parts[f"y_{part}"] = torch.tensor(stored[f"y_{part}"][chosen]).long().to(device)
        names = tuple(str(name) for name in stored["class_names"])
    return Scenes(parts["x_train"], parts["y_train"], parts["x_test"], parts["y_test"], names)


def _opened(folder: str | Path, name: str) -> Any:
    path = Path(folder) / _FILES[name]
    if not path.exists():
        raise DataError(f"{path} is not there: the image tables need it")
    return np.load(path, allow_pickle=False)


def _pixels(images: np.ndarray[Any, Any]) -> Tensor:
    x = torch.from_numpy(images.astype(np.float32) / 255.0)
    return x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()


def _mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """In a fixed random order."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    return x[order], y[order]


def _spread(total: int, wanted: int | None) -> np.ndarray[Any, Any]:
    if wanted is None or wanted >= total:
        return np.arange(total)
    return np.arange(wanted) * total // wanted
