"""Functional methods on UCI regression: fbnn, vip and mean-field, all splits, one process a cell.

    python benchmarks/functional_uci.py --data DATA --out results --processes 15 --minutes 9

Reads DATA/uci/NAME.npz. Each cell (a method on a set, all of its splits in one stacked fit, by the
protocols of `doxa bench uci`: settings are chosen on training rows) is written to
OUT/METHOD-SET.json as soon as it is done; what is not done in time is given up. On the CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

SETS = ("boston_housing", "concrete", "energy", "wine_quality_red", "yacht")
METHODS = ("fbnn", "vip", "mean-field")


def cell(folder: str, out: str, name: str, method: str, splits: int | None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from doxa.app.bench import uci
    from doxa.app.bench.protocols import PROTOCOLS, Problem

    data = uci.load(Path(folder), name)
    train, test = data.train[:splits], data.test[:splits]
    problem = Problem(data.x, data.y, train, hidden=50, seed=0)
    start = time.perf_counter()
    answer = PROTOCOLS[method].fit(problem, name)
    fitted = time.perf_counter() - start
    scores = [uci.score(answer, r, data.x[rows], data.y[rows]) for r, rows in enumerate(test)]
    kept = ("rmse", "log_likelihood", "log_likelihood_matched", "crps", "coverage")
    result: dict[str, Any] = {
        **answer.facts, "method": method, "set": name, "splits": len(test), "seconds": fitted,
        "status": answer.statuses(),
        "scores": {key: uci.summary([row[key] for row in scores if key in row]) for key in kept
                   if key in scores[0]},
    }  # fmt: skip
    Path(out, f"{method}-{name}.json").write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--splits", type=int, help="the first so many; default: all")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=9.0)
    asked = parser.parse_args()
    Path(asked.out).mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * asked.minutes
    spawn = multiprocessing.get_context("spawn")
    waiting = [(method, name) for name in asked.sets for method in asked.methods]
    running: dict[tuple[str, str], Any] = {}
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < asked.processes:
            method, name = waiting.pop(0)
            own = (asked.data, asked.out, name, method, asked.splits)
            running[method, name] = spawn.Process(target=cell, args=own)
            running[method, name].start()
        for key, process in list(running.items()):
            if not process.is_alive():
                del running[key]
                left = end - time.monotonic()
                sys.stdout.write(f"{' '.join(key)}: exit {process.exitcode}, {left:.0f} s left\n")
                sys.stdout.flush()
        time.sleep(0.5)
    for key, process in running.items():
        process.kill()
        sys.stdout.write(f"{' '.join(key)}: given up\n")


if __name__ == "__main__":
    main()
