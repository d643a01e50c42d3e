"""Deep ensembles on UCI regression: 20 standard splits × 5 members as one stacked run.

    DOXA_DATA=… python benchmarks/uci.py [--sets boston,concrete,energy,yacht]

Protocol of Lakshminarayanan et al. (2017): one hidden ReLU layer of 50 units, a heteroscedastic
head, 40 epochs, batches of 32, standardised on each split's training rows, scored in original
units. The rate 0.005 (constant) and the prior N(0, 1) are fixed for all sets. Both log-likelihoods
are given: that of the mixture of five Gaussians, and of the moment-matched Gaussian the paper
scores. A loop over nets, timed on one split and one member, is scaled to the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import doxa

PUBLISHED = {  # RMSE, LL: Lakshminarayanan et al. (2017), table 1
    "boston_housing": (3.28, -2.41), "concrete": (6.03, -3.06), "energy": (2.09, -1.38),
    "yacht": (1.58, -1.18), "wine_quality_red": (0.64, -0.94), "power_plant": (4.11, -2.79),
    "kin8nm": (0.09, 1.20), "naval_propulsion": (0.00, 5.63), "protein": (4.71, -2.83),
}  # fmt: skip


def load(name: str) -> dict[str, Any]:
    folder = os.environ.get("DOXA_DATA")
    if not folder:
        raise SystemExit("set DOXA_DATA to the folder that holds uci/*.npz")
    return dict(np.load(Path(folder) / "uci" / f"{name}.npz", allow_pickle=False))


def deep_ensemble(name: str, seed: int = 0) -> dict[str, Any]:
    """Fit all splits in one stacked run; mean and standard error over splits."""
    d = load(name)
    x, y = torch.tensor(d["X"]), torch.tensor(d["y"])
    hidden = 100 if name == "protein" else 50
    net = doxa.nets.mlp(x.shape[1], 2, hidden=(hidden,))
    start = time.perf_counter()
    sweep = doxa.fit(
        net, (x, y), "deep-ensemble", likelihood="heteroscedastic", members=5, seed=seed,
        runs=doxa.Runs(rows=list(d["train_index"])), standardize=True, epochs=40, batch_size=32,
        lr=0.005, schedule="constant", progress=False,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    scores = []
    for r, posterior in enumerate(sweep):
        test = torch.tensor(d["test_index"][r]).long()
        p = posterior.predict(x[test])
        target = y[test].unsqueeze(1).to(p.mean)
        rmse = (p.mean - target).square().mean().sqrt()
        matched = p.moment_matched().log_prob(target).mean()
        scores.append([float(rmse), float(p.log_prob(target).mean()), float(matched)])
    table = np.array(scores)
    error = table.std(0, ddof=1) / np.sqrt(len(table))
    return {
        "set": name, "rmse": table[:, 0].mean(), "rmse_se": error[0], "ll": table[:, 1].mean(),
        "ll_se": error[1], "ll_matched": table[:, 2].mean(), "ll_matched_se": error[2],
        "published": PUBLISHED[name], "seconds": seconds, "splits": len(table),
        "engine": f"{sweep[0].diagnostics['engine']}:{sweep[0].diagnostics['mode']}",
        "loop_seconds": plain_loop(d, hidden) * len(table) * 5,
    }  # fmt: skip


def plain_loop(d: dict[str, Any], hidden: int) -> float:
    """Seconds of one net on one split, written by hand, with fused Adam."""
    index = torch.tensor(d["train_index"][0]).long()
    x, y = (torch.tensor(d[k])[index].float() for k in ("X", "y"))
    x, y = (x - x.mean(0)) / x.std(0).clamp(min=1e-9), ((y - y.mean()) / y.std()).unsqueeze(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2)
    )
    adam = torch.optim.Adam(net.parameters(), lr=0.005, fused=True)
    epochs = 4
    start = time.perf_counter()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            mean, s = net(x[rows]).chunk(2, 1)
            std = torch.nn.functional.softplus(s) + 1e-3
            decay = sum(p.square().sum() for p in net.parameters()) / (2 * len(x))
            loss = (0.5 * ((y[rows] - mean) / std).square() + std.log()).mean() + decay
            adam.zero_grad()
            loss.backward()
            adam.step()
    return (time.perf_counter() - start) * 40 / epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", default="boston_housing,concrete,energy,yacht")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "uci.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.sets.split(","):
        row = deep_ensemble({"boston": "boston_housing"}.get(name, name))
        rows.append(row)
        rmse, ll = row["published"]
        print(
            f"{row['set']:18s} RMSE {row['rmse']:.3f} ± {row['rmse_se']:.3f} ({rmse})   "
            f"LL mixture {row['ll']:.3f} ± {row['ll_se']:.3f}   matched {row['ll_matched']:.3f} ± "
            f"{row['ll_matched_se']:.3f} ({ll})   {row['seconds']:.1f} s {row['engine']}, loop "
            f"{row['loop_seconds']:.0f} s: {row['loop_seconds'] / row['seconds']:.0f}×",
            flush=True,
        )
    result = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1, "rows": rows}
    Path(arguments.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
