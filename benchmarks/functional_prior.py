"""A prior tuned to Gaussian processes against N(0, 1) and N(0, 1/fan-in), on UCI sets.

    python -m benchmarks.functional_prior --data FOLDER --splits 10 --out results/ [--jobs 15]

The protocol of Tran et al. (2022): one hidden layer of 100 tanh units, noise variance 0.1 in
standardised units, 4 chains with 30 draws each. Priors, all fixed beforehand for every set:

    normal     N(0, 1) on weights and biases
    fan-in     N(0, 1/fan-in) on weights, N(0, 1) on biases: what the paper calls N(0, 1), since its
               layers divide by √fan-in
    matched    tuned to an RBF process, variance 1, lengthscale √(2D)
    matched-hierarchical       the same with unknown scales of the weights
    matched-hierarchical-gp    tuned to RBF processes with a lengthscale for each column and a
               variance that are log-normal about √(2D) and e^0.1 with spread 1, as in the paper
    hierarchical-both, flow    the same processes, unknown scales of the weights or a flow

Writes functional_prior.json after every fit; stops itself at `--minutes`, and goes on from what is
in the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import doxa

PRIORS = (
    "normal", "fan-in", "matched", "matched-hierarchical", "matched-hierarchical-gp",
    "hierarchical-both", "flow",
)  # fmt: skip
METHODS = {
    "sghmc": {"draws": 30, "burn_in": 20_000, "thin": 300, "friction": 0.03},
    "hmc": {"draws": 30, "burn_in": 300, "leapfrog": 50, "thin": 3},
}


def tuned(prior: str, net: Any, x: Tensor, seed: int, steps: int) -> Any:
    if prior == "normal":
        return doxa.Normal(1.0)
    if prior == "fan-in":
        return doxa.FanInNormal(1.0)
    options: dict[str, Any] = {"steps": steps, "seed": seed}
    if prior in ("matched-hierarchical", "hierarchical-both"):
        options["kind"] = "hierarchical"
    elif prior == "flow":
        options["kind"] = "flow"
    if prior in ("matched-hierarchical-gp", "hierarchical-both", "flow"):
        options |= {"spread": 1.0, "variance": math.exp(0.1)}
    return doxa.functional_prior(net, x, "rbf", **options)


def one(
    x: Tensor, y: Tensor, train: Tensor, test: Tensor, prior: str, method: str, seed: int,
    device: str, short: bool,
) -> dict[str, Any]:  # fmt: skip
    """One split under one prior, scored in the units of y."""
    mean, std = x[train].mean(0), x[train].std(0, correction=0)
    x = ((x - mean) / torch.where(std > 0, std, torch.ones_like(std))).float()
    centre, scale = y[train].mean(), y[train].std(correction=0)
    z = ((y - centre) / scale).float()
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], 100), torch.nn.Tanh(), torch.nn.Linear(100, 1)
    ).to(device)
    began = time.monotonic()
    chosen = tuned(prior, net, x[train], seed, 20 if short else 300)
    matched = time.monotonic() - began
    settings = METHODS[method] if not short else {"draws": 5, "burn_in": 20}
    likelihood = doxa.Gaussian(noise=math.sqrt(0.1))
    posterior = doxa.fit(
        net, (x[train], z[train]), doxa.get_method(method)(**settings), likelihood=likelihood,
        prior=chosen, members=4, seed=seed, batch_size=32, lr=1e-3, device=device, progress=False,
    )  # fmt: skip
    p = posterior.predict(x[test].to(device))
    target = z[test].reshape(p.mean.shape).to(device)
    log_prob = p.log_prob(target).mean() - math.log(float(scale))
    found = {
        "rmse": float((p.mean - target).square().mean().sqrt()) * float(scale),
        "nll": -float(log_prob),
        "seconds": time.monotonic() - began, "matching": matched,
        "status": str(posterior.status),
    }  # fmt: skip
    if hasattr(chosen, "distances"):
        found["distance"] = [float(chosen.distances[:10].mean()),
                             float(chosen.distances[-30:].mean())]  # fmt: skip
        found["prior"] = {name: vars(own) for name, own in chosen.items()}
    return found


def read(folder: Path, name: str, split: int) -> list[Tensor]:
    """Inputs, targets, and the numbers of the training and of the test rows."""
    with np.load(folder / "uci" / f"{name}.npz", allow_pickle=False) as stored:
        x, y = (torch.from_numpy(stored[part]).double() for part in ("X", "y"))
        rows = [torch.tensor(stored[f"{part}_index"][split]).long() for part in ("train", "test")]
    return [x, y.flatten(), *rows]


def cell(folder: Path, key: str, device: str, short: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    name, method, prior, split = key.split("/")
    return one(*read(folder, name, int(split)), prior, method, int(split), device, short)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds uci/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default="boston_housing,yacht")
    parser.add_argument("--priors", default=",".join(PRIORS))
    parser.add_argument("--methods", default="sghmc")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--short", action="store_true", help="a look whether it runs")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    path, end = a.out / "functional_prior.json", time.monotonic() + 60 * a.minutes
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    asked = itertools.product(
        a.methods.split(","), range(a.splits), a.sets.split(","), a.priors.split(",")
    )
    keys = [f"{name}/{method}/{prior}/{split}" for method, split, name, prior in asked]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(a.jobs, context) as pool:
        waiting = {
            pool.submit(cell, a.data, key, a.device, a.short): key
            for key in keys
            if key not in found
        }
        try:
            for done in as_completed(waiting, timeout=max(0.0, end - time.monotonic())):
                key = waiting[done]
                found[key] = done.result()
                path.write_text(json.dumps(found))
                said = {k: found[key][k] for k in ("rmse", "nll", "seconds", "status")}
                sys.stdout.write(f"{key}: {said}\n")
                sys.stdout.flush()
        except TimeoutError:
            sys.stdout.write("out of time: what runs is finished, the rest is left\n")
            pool.shutdown(wait=False, cancel_futures=True)
    report(found)


def report(found: dict[str, Any]) -> None:
    """Means over splits, with standard errors."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, value in found.items():
        groups.setdefault(key.rpartition("/")[0], []).append(value)
    for key, values in sorted(groups.items()):
        parts = []
        for score in ("rmse", "nll"):
            each = [v[score] for v in values]
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
            parts.append(f"{score} {statistics.mean(each):.3f} ± {error:.3f}")
        sys.stdout.write(f"{key} ({len(values)} splits): {', '.join(parts)}\n")


if __name__ == "__main__":
    main()
