"""MNIST, the network of Gal, Islam & Ghahramani (2017), and its training, settled on other rows."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import doxa
from doxa.decide.active.learn import scored

HELD_OUT = 5000  # training images that settle how to train; no campaign asks about them
GRID: dict[str, list[Any]] = {
    "scale": ["standard", "unit"], "init": ["glorot", "torch"], "sd": [1.0, 0.3, 3.0],
    "lr": [1e-3, 3e-3], "steps": [250, 750],
}  # fmt: skip
# The best of 250 steps in results/active_mnist/settle.json; 750 are better, and take longer.
SETTLED = {"scale": "standard", "init": "glorot", "sd": 1.0, "lr": 3e-3, "steps": 250, "batch": 64}


class GlorotLinear(nn.Linear):
    """Keras' first weights: uniform, of variance 2/(inputs + outputs)."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class GlorotConv2d(nn.Conv2d):
    """The same, where inputs and outputs count once for every place of the filter."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        assert self.bias is not None
        nn.init.zeros_(self.bias)


def net(settings: dict[str, Any]) -> nn.Sequential:
    """conv 32 of 4 × 4, conv 32 of 4 × 4, pooling, dropout ¼, 128 units, dropout ½, 10 classes."""
    keras = settings["init"] == "glorot"
    conv, dense = (GlorotConv2d, GlorotLinear) if keras else (nn.Conv2d, nn.Linear)
    return nn.Sequential(
        conv(1, 32, 4), nn.ReLU(), conv(32, 32, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), dense(32 * 11 * 11, 128), nn.ReLU(), nn.Dropout(0.5),
        dense(128, 10),
    )  # fmt: skip


@functools.cache
def images(folder: Path, device: str, scale: str = "unit") -> dict[str, tuple[Tensor, Tensor]]:
    """The pool, rows that settle the training (both of the training images), and the test rows."""
    with np.load(folder / "mnist.npz") as file:
        raw = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}

    def pair(kind: str) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(raw[f"x_{kind}"]).float().reshape(-1, 1, 28, 28)
        x = x / 255.0 if float(x.max()) > 1.5 else x
        x = (x - 0.1307) / 0.3081 if scale == "standard" else x
        return x.to(device), torch.from_numpy(raw[f"y_{kind}"]).long()

    (x, y), test = pair("train"), pair("test")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(123))
    held, pool = order[:HELD_OUT], order[HELD_OUT:]
    some = [(x[rows.to(x.device)], y[rows]) for rows in (pool, held)]
    return {"pool": some[0], "held out": some[1], "test": test}


def options(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """What `fit` is given, but for the steps."""
    return {
        "likelihood": "categorical", "prior": doxa.Normal(settings["sd"]), "validation": None,
        "batch_size": settings["batch"], "lr": settings["lr"], "progress": False,
        "engine": "auto" if device == "cpu" else "stack:graph",
    }  # fmt: skip


def settle(asked: argparse.Namespace, until: float) -> None:
    """How to train, chosen by the error on held-out training rows: the mean over 100 and 250 random
    labels and three seeds. Writes settings.json, and every candidate into settle.json."""
    tried: list[dict[str, Any]] = []
    keys = list(GRID)
    for values in itertools.product(*GRID.values()):
        settings = SETTLED | dict(zip(keys, values, strict=True))
        settings |= {"steps": 10, "batch": 8} if asked.tiny else {}
        settings["wrong"] = errors(asked, settings)
        tried.append(settings)
        print(settings, flush=True)
        (asked.out / "settle.json").write_text(json.dumps(tried, indent=1))
        if time.time() > until:
            break
    best = min(tried, key=lambda one: float(np.mean(one["wrong"])))
    print(f"settled: {best}", flush=True)
    (asked.out / "settings.json").write_text(json.dumps(best))


def errors(asked: argparse.Namespace, settings: dict[str, Any]) -> list[float]:
    """% of held-out training rows that are wrong, at 100 and at 250 random labels."""
    found = images(asked.data, asked.device, settings["scale"])
    x, y = found["pool"]
    seeds, counts = range(1 if asked.tiny else 3), (100, 250)
    rows = [
        torch.randperm(len(y), generator=torch.Generator().manual_seed(1000 + seed))[:count]
        for count in counts
        for seed in seeds
    ]
    union = torch.cat(rows)
    starts = np.cumsum([0, *(len(own) for own in rows)])
    own = [torch.arange(a, b) for a, b in itertools.pairwise(starts)]
    sweep = doxa.fit(
        net(settings).to(asked.device), (x[union.to(x.device)], y[union]), "mc-dropout",
        steps=settings["steps"], runs=doxa.Runs(rows=own), **options(settings, asked.device),
    )  # fmt: skip
    test = found["held out"]
    if asked.tiny:
        test = (test[0][:200], test[1][:200])
    wrong = [100 * (1 - scored(p, test, 10 if asked.tiny else 50)["accuracy"]) for p in sweep]
    return [round(float(v.mean()), 2) for v in np.array(wrong).reshape(len(counts), -1)]
