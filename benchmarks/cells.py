"""Some cells of a table, in an order of one's own, until the time is up.

    python -m benchmarks.cells uci protein:mean-field protein:rank1 --data FOLDER --out FOLDER
        [--device cuda] [--jobs 4] [--minutes 8] [--seeds 0,1,2]

`doxa bench` and `python -m benchmarks.images` compute all pairs of some sets and methods; this is
for single cells of any of their tables. A cell is added to OUT/TABLE.jsonl as soon as it is known;
what is not finished when the time is up is lost.
"""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from benchmarks.images import TABLES
from doxa.app.bench import compute, find, store_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table")
    parser.add_argument("cells", nargs="+", help="SET:METHOD")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--seeds", default="0")
    args = parser.parse_args()
    table = TABLES.get(args.table) or find(args.table)
    tasks = [
        task
        for seed in map(int, args.seeds.split(","))
        for name, method in (cell.split(":") for cell in args.cells)
        for task in table.tasks(args.data, [name], [method], args.device, seed)
    ]
    end = threading.Timer(60 * args.minutes, os._exit, (0,))  # other processes follow
    end.daemon = True
    end.start()
    store = store_of(table, args.out)
    compute(tasks, store, args.jobs, lambda line: print(line, flush=True))
    end.cancel()


if __name__ == "__main__":
    main()
