"""MNIST by infinitely wide networks: exact inference with 10,000 to 50,000 rows, nothing trained.

    python -m benchmarks.nngp_mnist --device cuda --rows 10000,50000 --out results/
    python -m benchmarks.nngp_mnist --rows 1000 --test 500 --choose 500       # a trial on a CPU

Depth, σ_w and the noise are chosen on 5,000 held-out training images, by a fit to 5,000
others. Images are divided by 255 and flattened; --conv adds a convolutional network (three
3 × 3 layers, flattened). Writes nngp_mnist.json: accuracy, log-likelihood, calibration error and
seconds, and what an entry of the kernel costs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import doxa
from doxa.function.wide import Architecture
from doxa.function.wide.nngp import NNGP

Rows = tuple[Tensor, Tensor]


def digits(conv: bool = False) -> tuple[Rows, Rows]:
    """Train and test images [N, 784], or [N, 1, 28, 28], and classes."""
    with np.load(Path(os.environ.get("DOXA_DATA", "data")) / "mnist.npz") as found:
        parts = [found[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    x, y, u, v = (torch.from_numpy(part) for part in parts)
    shape = (-1, 1, 28, 28) if conv else (-1, 784)
    return (x.reshape(shape).float() / 255, y.long()), (u.reshape(shape).float() / 255, v.long())


def waited(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def evaluated(
    method: NNGP, train: Rows, test: Rows, device: str, net: Any = None
) -> dict[str, Any]:
    began = waited(device)
    posterior = doxa.fit(
        net, train, method, likelihood="categorical", device=device, dtype=torch.float32,
        progress=False,
    )  # fmt: skip
    fitted = waited(device)
    posterior.temperature  # noqa: B018  # leave-one-out, once
    ready = waited(device)
    predicted = posterior.predict(test[0], keep="moments")
    done = waited(device)
    y = test[1].to(device)
    return {
        "rows": len(train[1]), "test": len(y),
        "accuracy": float((predicted.probs.argmax(1) == y).double().mean()),
        "log_likelihood": float(predicted.log_prob(y).mean()),
        "ece": float(doxa.evaluate.ece(predicted, y)),
        "temperature": posterior.temperature.tolist(),
        "fit_s": round(fitted - began, 2), "calibrate_s": round(ready - fitted, 2),
        "predict_s": round(done - ready, 2),
    }  # fmt: skip


def entry_cost(device: str, rows: int = 2000) -> dict[str, float]:
    """Nanoseconds per entry of the kernel of 784 columns, in float64; a CPU by its own time."""
    x = torch.rand(rows, 784, device=device, dtype=torch.float64)
    other, costs = x.flip(0), {}
    for activation in ("relu", "erf", "gelu"):
        for depth in (1, 3):
            for kind in ("nngp", "ntk"):
                made = Architecture.fully_connected(depth, activation)
                made.matrix(x[:64], other, 1.5, 0.1, kind)
                began, busy = waited(device), time.process_time()
                made.matrix(x, other, 1.5, 0.1, kind)
                spent = waited(device) - began if device == "cuda" else time.process_time() - busy
                each = spent / rows**2
                costs[f"{activation}-{depth}-{kind}"] = round(each * 1e9, 3)
    return costs


def chosen(train: Rows, count: int, device: str, minutes: Any) -> tuple[dict[str, Any], list[Any]]:
    """Settings that classify the last `count` training images best, fitted to the first."""
    fitted = (train[0][:count], train[1][:count])
    held = (train[0][-count:], train[1][-count:])
    tried = []
    for depth in (1, 3, 5):
        for weight_std in (0.7, 1.0, 2**0.5):
            for noise in (0.01, 0.03, 0.1):
                if minutes() > 0.3:
                    continue
                settings = {"depth": depth, "weight_std": weight_std, "noise": noise}
                found = evaluated(fixed(settings), fitted, held, device)
                tried.append(settings | found)
                print(settings, found["accuracy"], found["log_likelihood"], flush=True)
    best = max(tried, key=lambda one: (one["accuracy"], one["log_likelihood"]))
    return {name: best[name] for name in ("depth", "weight_std", "noise")}, tried


def fixed(settings: dict[str, Any]) -> NNGP:
    return NNGP(bias_std=0.1, learn_kernel=False, **settings)


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (1, 8, 8):
        layers += [nn.Conv2d(inputs, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 784, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default="10000")
    parser.add_argument("--test", type=int, default=10000)
    parser.add_argument("--choose", type=int, default=5000, help="rows to choose on; 0: fixed")
    parser.add_argument("--conv", type=int, default=0, help="rows for the convolutional network")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    began = time.monotonic()
    minutes = lambda: (time.monotonic() - began) / 60 / args.minutes  # noqa: E731  # share spent
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": args.device, "torch": torch.__version__, "results": []}

    def write() -> None:
        (args.out / "nngp_mnist.json").write_text(json.dumps(found, indent=1))

    train, test = digits()
    test = (test[0][: args.test], test[1][: args.test])
    settings: dict[str, Any] = {"depth": 3, "weight_std": 2**0.5, "noise": 0.03}
    if args.choose:
        settings, found["tried"] = chosen(train, args.choose, args.device, minutes)
    found["settings"] = settings
    write()
    for rows in map(int, args.rows.split(",")):
        if minutes() > 0.8:
            break
        some = (train[0][:rows], train[1][:rows])
        found["results"].append(evaluated(fixed(settings), some, test, args.device))
        print(found["results"][-1], flush=True)
        write()
    if args.conv and minutes() < 0.8:
        train, (u, v) = digits(conv=True)
        some, few = (train[0][: args.conv], train[1][: args.conv]), (u[: args.test], v[: args.test])
        method = NNGP(bias_std=0.1, weight_std=2**0.5, noise=settings["noise"], learn_kernel=False)
        made = evaluated(method, some, few, args.device, convolutional())
        found["results"].append({"net": "conv 3 × (3 × 3), flattened"} | made)
        print(found["results"][-1], flush=True)
        write()
    found["ns_an_entry"] = entry_cost(args.device, 4000 if args.device == "cuda" else 1000)
    print(found["ns_an_entry"])
    write()


if __name__ == "__main__":
    main()
