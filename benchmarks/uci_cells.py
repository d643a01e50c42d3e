"""Cells of `doxa bench uci` on a machine that is lent for some minutes: a process a cell.

    python benchmarks/uci_cells.py --data DATA --out results/uci --methods vip,fbnn \
        --sets yacht,energy --processes 8 --minutes 8.5 [--device cuda]

Reads DATA/uci/NAME.npz. A cell is written the moment it is known, as `doxa bench` writes it, and
what is not done in time is given up; on a GPU, which others may share, nothing is killed: a cell is
begun only if the longest so far would fit in. Cells that OUT holds are not computed again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any


def one(data: str, out: str, method: str, name: str, device: str, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    from doxa.app.bench import Store, compute, find

    tasks = find("uci").tasks(data, [name], [method], device)
    compute(tasks, Store(out), tell=say)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--sets", default="yacht,boston,energy,concrete,wine")
    parser.add_argument("--methods", default="vip,fbnn,nngp,ntk,functional-prior")
    parser.add_argument("--cells", help="METHOD/SET, …, in this order, in place of both")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--minutes", type=float, default=8.5)
    asked = parser.parse_args()
    Path(asked.out).mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * asked.minutes
    spawn = multiprocessing.get_context("spawn")
    sets, methods = asked.sets.split(","), asked.methods.split(",")
    product = [f"{method}/{name}" for name in sets for method in methods]
    chosen = asked.cells.split(",") if asked.cells else product
    waiting = [(cell.split("/")[0], cell.split("/")[1]) for cell in chosen]
    running: dict[tuple[str, str], Any] = {}
    began: dict[tuple[str, str], float] = {}
    longest, gentle = 0.0, asked.device != "cpu"
    while running or (waiting and time.monotonic() < end - gentle * longest):
        if not gentle and time.monotonic() > end:
            break
        room = time.monotonic() < end - gentle * longest
        while waiting and room and len(running) < asked.processes:
            key = waiting.pop(0)
            began[key] = time.monotonic()
            own = (asked.data, asked.out, *key, asked.device, asked.threads)
            running[key] = spawn.Process(target=one, args=own)
            running[key].start()
        for key, process in list(running.items()):
            if not process.is_alive():
                del running[key]
                longest = max(longest, time.monotonic() - began[key])
                left = end - time.monotonic()
                say(f"{' '.join(key)}: exit {process.exitcode}, {left:.0f} s left")
        time.sleep(0.2)
    for key, process in running.items():
        process.kill()
        say(f"{' '.join(key)}: given up")
    for key in waiting:
        say(f"{' '.join(key)}: not begun")


if __name__ == "__main__":
    main()
