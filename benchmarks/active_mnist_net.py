"""MNIST, the network of Gal, Islam & Ghahramani (2017), and its training, settled on training rows.

A convolution is a linear layer on patches. `Patches` and `nn.Linear` are the same function as
`nn.Conv2d`, and many of them at once are one batched matrix product, where many convolutions are
one grouped convolution: `race` takes the faster of the two.
"""

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
from doxa.decide.active.rounds import scored

HELD_OUT = 5000  # training images that settle how to train; no campaign asks about them
GRID: dict[str, list[Any]] = {
    "scale": ["standard", "unit"], "init": ["glorot", "torch"], "sd": [1.0, 0.3, 3.0],
    "lr": [1e-3, 3e-3], "steps": [250, 750],
}  # fmt: skip
FIRST = {"scale": "unit", "init": "torch", "sd": 1.0, "lr": 1e-3, "steps": 250, "batch": 64}


class Patches(nn.Module):
    """[B, H, W, C] to [B, (H − k + 1)(W − k + 1), k·k·C]: what each place of a filter sees."""

    def __init__(self, side: int, k: int) -> None:
        super().__init__()
        self.side, self.k = side, k

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], self.side, self.side, -1)
        seen = x.unfold(1, self.k, 1).unfold(2, self.k, 1)  # [B, h, w, C, k, k]
        return seen.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)


class Pool(nn.Module):
    """The largest of 2 × 2 places: [B, side², C] to [B, C·(side/2)²]."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.half = side // 2

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], self.half, 2, self.half, 2, -1)
        return x.amax((2, 4)).flatten(1)


class GlorotLinear(nn.Linear):
    """Keras' first weights: uniform, of variance 2/(inputs + outputs); for a convolution of k × k
    places outputs count k² times."""

    places = 1

    def reset_parameters(self) -> None:
        bound = (6 / (self.in_features + self.places * self.out_features)) ** 0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)


class GlorotPatchLinear(GlorotLinear):
    places = 16


class GlorotConv2d(nn.Conv2d):
    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        assert self.bias is not None
        nn.init.zeros_(self.bias)


def net(settings: dict[str, Any]) -> nn.Sequential:
    """conv 32 of 4 × 4, conv 32 of 4 × 4, pooling, dropout ¼, 128 units, dropout ½, 10 classes."""
    keras = settings["init"] == "glorot"
    dense = GlorotLinear if keras else nn.Linear
    if settings.get("form") == "patches":
        linear = GlorotPatchLinear if keras else nn.Linear
        seen: list[nn.Module] = [
            Patches(28, 4), linear(16, 32), nn.ReLU(), Patches(25, 4), linear(512, 32), nn.ReLU(),
            Pool(22), nn.Dropout(0.25),
        ]  # fmt: skip
    else:
        conv = GlorotConv2d if keras else nn.Conv2d
        seen = [
            conv(1, 32, 4), nn.ReLU(), conv(32, 32, 4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(),
        ]  # fmt: skip
    return nn.Sequential(
        *seen, dense(32 * 11 * 11, 128), nn.ReLU(), nn.Dropout(0.5), dense(128, 10)
    )


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


def options(settings: dict[str, Any], engine: str = "auto") -> dict[str, Any]:
    """What `fit` is given, but for the steps."""
    return {
        "likelihood": "categorical", "prior": doxa.Normal(settings["sd"]), "validation": None,
        "batch_size": settings["batch"], "lr": settings["lr"], "progress": False,
        "engine": engine,
    }  # fmt: skip


def race(asked: argparse.Namespace, networks: int) -> tuple[str, str]:
    """The fastest (form, engine) for a fit of the size to come."""
    if asked.device == "cpu":
        return "conv", "auto"
    x, y = images(asked.data, asked.device)["pool"]
    rows = [torch.arange(60 * i, 60 * i + 60) for i in range(networks)]
    seconds = {}
    for form in ("patches", "conv"):
        settings = FIRST | {"form": form}
        for steps in (3, 3, 60):  # the first warms up, the second is what a fit costs without steps
            begin = time.perf_counter()
            try:
                doxa.fit(
                    net(settings).to(asked.device), (x[: 60 * networks], y[: 60 * networks]),
                    "mc-dropout", steps=steps, runs=doxa.Runs(rows=rows),
                    **options(settings, "stack:graph"),
                )  # fmt: skip
            except Exception as error:  # whatever goes wrong: the other one
                print(f"{form} fails: {error}", flush=True)
                break
            seconds[form, steps] = round(time.perf_counter() - begin, 3)
    print(f"seconds for 3 and 60 steps of {networks} networks: {seconds}", flush=True)
    whole = {form: s for (form, steps), s in seconds.items() if steps == 60}
    return (min(whole, key=lambda form: whole[form]), "stack:graph") if whole else ("conv", "auto")


def settle(asked: argparse.Namespace, until: float) -> None:
    """How to train, chosen by the error on held-out training rows: the mean over 100 and 250 random
    labels and three seeds. Writes settings.json, and every candidate into settle.json."""
    form, engine = race(asked, 6)
    tried: list[dict[str, Any]] = []
    keys = list(GRID)
    for values in itertools.product(*GRID.values()):
        settings = FIRST | dict(zip(keys, values, strict=True)) | {"form": form, "engine": engine}
        settings |= {"steps": 10, "batch": 8} if asked.tiny else {}
        try:
            settings["wrong"] = errors(asked, settings)
        except RuntimeError as error:  # out of memory, or an operation that is not there
            print(f"{form} fails: {error}", flush=True)
            form = "conv"
            settings |= {"form": form, "wrong": [100.0]}
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
        steps=settings["steps"], runs=doxa.Runs(rows=own), **options(settings, settings["engine"]),
    )  # fmt: skip
    test = found["held out"]
    if asked.tiny:
        test = (test[0][:200], test[1][:200])
    wrong = [100 * (1 - scored(p, test, 10 if asked.tiny else 50)["accuracy"]) for p in sweep]
    return [round(float(v.mean()), 2) for v in np.array(wrong).reshape(len(counts), -1)]
