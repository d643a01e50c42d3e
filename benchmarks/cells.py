"""Some cells of a table, in an order of one's own, until the time is up.

    python benchmarks/cells.py uci protein:mean-field protein:rank1 --data FOLDER --out FOLDER
        [--device cuda] [--jobs 4] [--minutes 8] [--seeds 0,1,2]

`doxa bench` computes a rectangle of sets and methods; this is for what is missing in one. A cell is
written the moment that it is known, to FOLDER/TABLE; what is under way at the end is lost.
"""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from doxa.app.bench import Store, compute, find


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
    table = find(args.table)
    tasks = [
        task
        for seed in map(int, args.seeds.split(","))
        for name, method in (cell.split(":") for cell in args.cells)
        for task in table.tasks(args.data, [name], [method], args.device, seed)
    ]
    end = threading.Timer(60 * args.minutes, os._exit, (0,))  # other processes follow
    end.daemon = True
    end.start()
    compute(tasks, Store(args.out / args.table), args.jobs, lambda line: print(line, flush=True))
    end.cancel()


if __name__ == "__main__":
    main()
