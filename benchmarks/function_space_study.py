"""VIP and fBNN on validation rows: which settings make them overconfident or too noisy.

    python -m benchmarks.function_space_study vip --data DATA --out DIR --device cuda --minutes 8
    python -m benchmarks.function_space_study fbnn --data DATA --out DIR --processes 4

Each study is a list of fits to the training rows of a UCI set's first splits without their last
fifth, which is then predicted; test rows are never looked at. OUT/STUDY-PROCESS.json has for each
setting the mean log-likelihood, RMSE and share of rows inside 95 % intervals, and the RMSE of the
rows that were fitted to.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

# (set, hidden layers, activation, epochs, grid, settings of the method, options of fit)
Case = tuple[str, tuple[int, ...], str, int, dict[str, Any], dict[str, Any], dict[str, Any]]

SCALES = {"initial_scale": (1.0, 0.3, 0.1, 0.03, 0.01), "lr": (0.003, 0.01)}


def vip_cases() -> list[Case]:
    sets = ("yacht", "energy", "boston_housing", "concrete")
    made: list[Case] = []
    for epochs in (200, 800):
        for hidden, activation in (((50,), "relu"), ((10, 10), "tanh")):
            made += [(name, hidden, activation, epochs, SCALES, {}, {}) for name in sets]
    for own, options in (
        ({"alpha": 0.0}, {}), ({"exact": True}, {}), ({}, {"validation": 0.1}),
        ({"functions": 50}, {}),
    ):  # fmt: skip
        made += [(name, (50,), "relu", 200, SCALES, own, options) for name in sets]
    return made


def fbnn_cases() -> list[Case]:
    made: list[Case] = []
    base = {"samples": 16, "measured_rows": 20}
    for own, options in (
        ({}, {}), ({}, {"validation": 0.1}), ({"samples": 64}, {}), ({"extra_points": 5}, {}),
        ({"samples": 64, "measured_rows": 40}, {}), ({"smoothing": 0.3}, {}),
        ({"eigenvalue_share": 0.999}, {}),
        ({"margin": 0.1}, {}), ({"samples": 64}, {"validation": 0.1}),
        ({"initial_std": 0.2}, {}), ({"samples": 64, "smoothing": 0.02}, {}),
    ):  # fmt: skip
        made += [
            (name, (50,), "relu", epochs, {"lr": (0.003, 0.01)}, base | own, options)
            for name in ("boston_housing", "concrete")
            for epochs in (50, 100, 400)
        ]
    return made


STUDIES = {"vip": vip_cases, "fbnn": fbnn_cases}


def run(which: str, case: Case, data: str, splits: int, device: str) -> list[dict[str, Any]]:
    """One stacked fit; a row for each point of the grid."""
    import torch

    torch.set_num_threads(1)
    import doxa
    from doxa.app.bench import uci

    name, hidden, activation, epochs, grid, settings, options = case
    found = uci.load(Path(data), name)
    x, y = found.x.to(device), found.y.to(device)
    kept, held = uci.Problem(x, y, found.train[:splits], 50, 0).validation()
    start = time.perf_counter()
    sweep = doxa.fit(
        doxa.nets.mlp(x.shape[1], 1, hidden=hidden, activation=activation), (x, y),
        doxa.get_method(which)(**settings), likelihood="gaussian", epochs=epochs,
        batch_size=32 if which == "vip" else 64, schedule="cosine", standardize=True,
        progress=False, device=device, runs=doxa.Runs(rows=kept, grid=grid),
        **({"validation": None} | options),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    rows: dict[tuple[Any, ...], list[list[float]]] = {}
    for posterior, spec in zip(sweep, sweep.specs, strict=True):
        out = held[spec.split]
        p = posterior.predict(x[out])
        low, high = (t.reshape(-1) for t in p.interval(0.95))
        inside = ((y[out] >= low) & (y[out] <= high)).double().mean()
        rows.setdefault(tuple(spec.hyper[key] for key in grid), []).append([
            float(p.log_prob(y[out]).mean()), _rmse(p, y[out]), float(inside),
            _rmse(posterior.predict(x[kept[spec.split]]), y[kept[spec.split]]),
        ])  # fmt: skip
    names = ("ll", "rmse", "coverage", "rmse_fitted")
    return [
        {
            "set": name, "net": [list(hidden), activation], "epochs": epochs, **settings, **options,
            **dict(zip(grid, point, strict=True)), "splits": len(own), "seconds": seconds,
            **{key: sum(row[i] for row in own) / len(own) for i, key in enumerate(names)},
        }
        for point, own in rows.items()
    ]  # fmt: skip


def _rmse(p: Any, y: Any) -> float:
    return float((p.mean.reshape(-1) - y).square().mean().sqrt())


def worker(which: str, mine: list[Case], asked: argparse.Namespace, number: int) -> None:
    rows: list[dict[str, Any]] = []
    for case in mine:
        try:
            rows += run(which, case, asked.data, asked.splits, asked.device)
        except Exception as error:
            sys.stdout.write(f"{case}: {error!r}\n")
            continue
        best = max(rows[-math.prod(map(len, case[4].values())) :], key=lambda row: row["ll"])
        sys.stdout.write(f"{best}\n")
        sys.stdout.flush()
        Path(asked.out, f"{which}-{number}.json").write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", type=int, help="the first so many cases")
    asked = parser.parse_args()
    Path(asked.out).mkdir(parents=True, exist_ok=True)
    cases = STUDIES[asked.study]()[: asked.only]
    spawn, end = multiprocessing.get_context("spawn"), time.monotonic() + 60 * asked.minutes
    workers = [
        spawn.Process(target=worker, args=(asked.study, cases[i :: asked.processes], asked, i))
        for i in range(asked.processes)
    ]
    for one in workers:
        one.start()
    while any(one.is_alive() for one in workers) and time.monotonic() < end:
        time.sleep(0.2)
    for one in workers:
        one.kill()


if __name__ == "__main__":
    main()
