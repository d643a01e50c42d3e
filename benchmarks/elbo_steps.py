"""What a variational step costs, in steps of `map`: 784-400-400-10, 128 rows, one thread.

    python benchmarks/elbo_steps.py [--rounds 5] [--rows weights,local] [--engine loop:traced]

In each round every row is timed in turns with `map`, in one process; a ratio is the median over
rounds of a row's step over the mean of the `map` steps before and after it. Times are of the
process, so that others on the machine do not count, though they slow its memory down.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from before_after import training

LARGE = {"net": "784-400-400-10", "batch": 128, "members": 1}
Timed = Callable[[int], float]


def rows(engine: str) -> dict[str, tuple[Timed, int]]:
    """{name: (seconds a step of a fit of so many steps, how many)}."""
    each = partial(training, method="mean-field", engine=engine, **LARGE)  # type: ignore[arg-type]
    return {
        "weights": (each, 60),
        "weights, ten draws": (partial(each, samples=10), 12),
        "ivon": (partial(training, method="ivon", engine=engine, **LARGE), 60),  # type: ignore[arg-type]
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="beginnings of names, with commas")
    parser.add_argument("--engine", default="loop:traced", help="what `fit` chooses from 500 steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    map_step = partial(training, 60, method="map", engine=args.engine, **LARGE)  # type: ignore[arg-type]
    wanted = tuple(args.rows.split(","))
    print(f"{'':24} {'map, ms':>8} {'step, ms':>9} {'ratio':>6}")
    for name, (timed, length) in rows(args.engine).items():
        if not name.startswith(wanted):
            continue
        points, found = [map_step()], []
        for _ in range(args.rounds):
            found.append(timed(length))
            points.append(map_step())
        ratios = [2 * t / (points[i] + points[i + 1]) for i, t in enumerate(found)]
        base, own = 1e3 * statistics.median(points), 1e3 * statistics.median(found)
        print(f"{name:24} {base:8.2f} {own:9.2f} {statistics.median(ratios):6.2f}", flush=True)


if __name__ == "__main__":
    main()
