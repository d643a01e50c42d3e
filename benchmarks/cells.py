"""Cells of a table of `doxa bench` in one process, in the order given, until the time is up.

    DOXA_DATA=… python benchmarks/cells.py cifar-frn --cells map:0,map:1,swag:0 --device cuda \
        --minutes 8 --out results

`--cells` are METHOD:SEED; `--sets` as in `doxa bench`. A cell that began is finished, so a job that
is cut off loses one at most; what is known in `--out` is not computed again. For machines without
the command line's dependencies, and for several processes that share a GPU.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

import torch

from doxa.app.bench import Store, find
from doxa.app.bench.work import Task
from doxa.errors import MethodError


def wanted(asked: argparse.Namespace) -> list[Task]:
    """In the order given, sets within a cell."""
    table = find(asked.table)
    sets = asked.sets.split(",") if asked.sets else None
    scale = {} if asked.scale == "full" else {"scale": asked.scale}
    found: list[Task] = []
    for cell in asked.cells.split(","):
        method, _, seed = cell.partition(":")
        found += table.tasks(asked.data, sets, [method], asked.device, int(seed or 0), **scale)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table")
    parser.add_argument("--cells", required=True)
    parser.add_argument("--sets")
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", default="full", help="small: of an image table, to try it")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * asked.minutes
    store = Store(asked.out / asked.table)
    for task in wanted(asked):
        if time.monotonic() > end:
            print(f"{task.name}: the time is up", flush=True)
            continue
        start = time.monotonic()
        try:
            store.cell(task.key, lambda task=task: task.make(**task.arguments))  # type: ignore[misc]
        except MethodError as error:
            store.put(task.key, {"refused": str(error)}, 0.0)
        except Exception:
            print(f"{task.name} failed:\n{traceback.format_exc()}", flush=True)
            continue
        print(f"{task.name}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
