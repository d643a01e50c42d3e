"""Sparse and deep Gaussian processes on the UCI tables: all splits of a set as one stacked fit.

    DOXA_DATA=… python benchmarks/sparse_uci.py --device cuda --minutes 9 --out results/

100 inducing points, RBF kernels with a lengthscale a column, B = 500, the defaults otherwise; no
setting was chosen by test rows. Writes results/sparse_uci.json after every cell: RMSE and mean log
predictive density of the test rows in units of y, mean and standard error over splits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import doxa

SETS = (
    "yacht", "boston_housing", "energy", "concrete", "wine_quality_red", "kin8nm", "power_plant",
    "naval_propulsion", "protein",
)  # fmt: skip
METHODS: dict[str, Any] = {
    "sparse-gp": lambda: doxa.SparseGP(),
    "deep-gp": lambda: doxa.DeepGP(),
    "deep-gp-3": lambda: doxa.DeepGP(layers=3),
}


def cell(folder: Path, name: str, method: str, steps: int, splits: int, device: str) -> Any:
    """One set under one method: scores over splits."""
    data = np.load(folder / f"{name}.npz")
    x, y = torch.from_numpy(data["X"]).double(), torch.from_numpy(data["y"]).double()
    train, test = (data[f"{part}_index"][:splits] for part in ("train", "test"))
    rows = [torch.from_numpy(np.asarray(part)).long() for part in train]
    start = time.perf_counter()
    sweep = doxa.fit(
        None, (x, y), METHODS[method](), likelihood="gaussian", runs=doxa.Runs(rows=rows),
        standardize=True, steps=steps, batch_size=500, device=device, progress=False,
        validation=None,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    rmse, ll = [], []
    for posterior, part in zip(sweep, test, strict=True):
        index = torch.from_numpy(np.asarray(part)).long()
        p, truth = posterior.predict(x[index]), y[index]
        mean = p.mean.double().cpu().reshape(-1)
        rmse.append(float((mean - truth).square().mean().sqrt()))
        ll.append(float(p.log_prob(truth).double().mean()))
    elbos = [posterior.elbo for posterior in sweep]
    return {
        "set": name, "method": method, "steps": steps, "splits": len(rows), "seconds": seconds,
        "statuses": sorted({str(posterior.status) for posterior in sweep}),
        "elbo": float(np.mean([e for e in elbos if e is not None])),
        "rmse": float(np.mean(rmse)), "rmse_se": _error(rmse),
        "ll": float(np.mean(ll)), "ll_se": _error(ll), "lls": ll, "rmses": rmse,
    }  # fmt: skip


def _error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--splits", type=int, default=20)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    folder = Path(os.environ["DOXA_DATA"]) / "uci"
    began, cells = time.monotonic(), []
    rate = 0.0  # seconds a step of the slowest cell so far
    for name in asked.sets.split(","):
        for method in asked.methods.split(","):
            left = 60 * asked.minutes - (time.monotonic() - began)
            if left < 1.3 * rate * asked.steps + 10:
                print(f"no time for {name} {method}", flush=True)
                continue
            found = cell(folder, name, method, asked.steps, asked.splits, asked.device)
            rate = max(rate, found["seconds"] / asked.steps)
            cells.append(found)
            print(
                f"{name} {method}: RMSE {found['rmse']:.3f} ± {found['rmse_se']:.3f}, LL "
                f"{found['ll']:.3f} ± {found['ll_se']:.3f}, bound {found['elbo']:.1f}, "
                f"{found['seconds']:.0f} s, {found['statuses']}",
                flush=True,
            )
            facts = {"torch": str(torch.__version__), "device": asked.device, "cells": cells}
            (asked.out / "sparse_uci.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
