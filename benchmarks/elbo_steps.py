"""Cost of a variational step, relative to a step of `map`: 784-400-400-10, 128 rows, one thread.

    python -m benchmarks.elbo_steps [--rounds 5] [--rows weights,local] [--engine loop:traced]
    python -m benchmarks.elbo_steps --device cuda --engine stack:graph [--out FILE]

Fits of 4,000 steps, the default of these methods, that are cut off after 120: the driver looks at
a fit a hundred times, which costs as much as a few steps, and is counted as often as in a whole
fit. Every row is timed in turns with `map`, in one process; a ratio is the median over rounds of a
row's step over the mean of the `map` steps before and after it. Times are of the process, so that
others on the machine do not count, though they slow its memory down. On a GPU they are of the
clock, over 2,000 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import doxa
from benchmarks.before_after import network, rows_of

METHODS: dict[str, Any] = {
    "weights": doxa.MeanField(),
    "ten draws": doxa.MeanField(samples=10),  # nested, by the rule
    "weights, ten draws": doxa.MeanField(samples=10, estimator="weights"),
    "local, ten draws": doxa.MeanField(samples=10, estimator="local"),
    "local": doxa.MeanField(estimator="local"),
    "flipout": doxa.MeanField(estimator="flipout"),
    "ivon": doxa.IVON(),
}


class Done(Exception):
    """Enough steps have been timed."""


def seconds(method: Any, engine: str, device: str) -> float:
    """Of a step, from the 40th to the 120th; on a GPU from the 400th to the 2,400th. The
    values of a callback are copied from the device, so its steps are complete."""
    marks: dict[int, float] = {}
    first, last = (40, 120) if device == "cpu" else (400, 2400)
    clock = time.process_time if device == "cpu" else time.perf_counter

    def mark(step: int, _: Any) -> None:
        marks[step] = clock()
        if step >= last:
            raise Done

    with suppress(Done):
        doxa.fit(
            network("784-400-400-10"), rows_of(784, 10), method, members=1, steps=4000,
            batch_size=128, engine=engine, schedule="constant", likelihood=doxa.Gaussian(1.0),
            validation=None, progress=False, callbacks=[mark], device=device,
        )  # fmt: skip
    return (marks[last] - marks[first]) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="beginnings of names, with commas")
    parser.add_argument("--engine", default="loop:traced", help="what `fit` chooses from 500 steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="the same table, as JSON lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = tuple(args.rows.split(","))
    print(f"{'':24} {'map, ms':>8} {'step, ms':>9} {'ratio':>6}")
    for name, method in METHODS.items():
        if not name.startswith(wanted):
            continue
        points, found = [seconds(doxa.MAP(), args.engine, args.device)], []
        for _ in range(args.rounds):
            found.append(seconds(method, args.engine, args.device))
            points.append(seconds(doxa.MAP(), args.engine, args.device))
        ratios = [2 * t / (points[i] + points[i + 1]) for i, t in enumerate(found)]
        base, own = 1e3 * statistics.median(points), 1e3 * statistics.median(found)
        ratio = statistics.median(ratios)
        print(f"{name:24} {base:8.3f} {own:9.3f} {ratio:6.2f}", flush=True)
        if args.out:
            row = {"row": name, "engine": args.engine, "device": args.device, "map_ms": base,
                   "ms": own, "ratio": ratio}  # fmt: skip
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
