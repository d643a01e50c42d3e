"""Two versions of doxa in one run: the time of a step, a gradient, a prediction and a fit.

    python -m benchmarks.before_after OLD_SRC NEW_SRC [--rounds 2] [--pairs 3] [--rows map,nuts]

OLD_SRC and NEW_SRC are the folders that hold the package `doxa`. Each version lives in a process of
its own with one thread, and both stay up for a round, in which every row is timed in turns: old,
new, new, old, … A round starts fresh processes, because where memory comes to lie differs from one
to the next. Only one of them works at a time.

Everything goes through the public `doxa.fit` and `predict`. A step's time is taken between the
callbacks of one fit, from the first one past a fifth of its steps (of its draws, for samplers) to
the last, so that setting up, recording and compiling do not count and all else does. The clock is
the process's own seconds unless `--clock wall`, because machines are shared.

The table gives the median and the smallest time of each version, the ratio new/old as the median
over neighbours in time, and that ratio of the smallest. With OLD_SRC and NEW_SRC the same it shows
what of a ratio is noise. `--rows` chooses by the beginnings of names, in that order, `--out` also
writes JSON, and `--minutes` ends it: rows that were not reached are missing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

Result = dict[str, Any]
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}
clock = CLOCKS["cpu"]


class Row(NamedTuple):
    """`call(length)` gives seconds."""

    call: Callable[[int], float]
    length: int
    unit: str = "step"


@cache
def rows_of(inputs: int, outputs: int = 1, n: int = 2048) -> tuple[Any, Any]:
    """As in `speed.py` and `sg_steps.py`."""
    import torch

    x = torch.randn(n, inputs, generator=torch.Generator().manual_seed(0))
    return x, x[:, :outputs].clone() if outputs > 1 else x.sum(1, keepdim=True)


def network(name: str, activation: str = "relu") -> Any:
    import doxa

    inputs, *hidden, outputs = map(int, name.split("-"))
    return doxa.nets.mlp(inputs, outputs, hidden=tuple(hidden), activation=activation)


def sizes(name: str) -> tuple[int, int]:
    parts = name.split("-")
    return int(parts[0]), int(parts[-1])


def between(fit: Callable[..., Any], start: float) -> tuple[float, Any]:
    """Seconds per step of a fit after `start` steps, and its result."""
    marks: list[tuple[int, float]] = []
    found = fit(callbacks=[lambda step, _: marks.append((step, clock()))])
    first = next(mark for mark in marks if mark[0] > start)
    last = marks[-1]
    if last[0] == first[0]:
        raise RuntimeError(f"too few callbacks after step {start}: {[step for step, _ in marks]}")
    return (last[1] - first[1]) / (last[0] - first[0]), found


def training(
    length: int, *, method: str, net: str, members: int, batch: int, engine: str, n: int = 2048,
    **settings: Any,
) -> float:  # fmt: skip
    """A step of a method that optimises."""
    import doxa

    fit = partial(
        doxa.fit, network(net), rows_of(*sizes(net), n), doxa.get_method(method)(**settings),
        members=members, steps=length, batch_size=batch, engine=engine, schedule="constant",
        likelihood=doxa.Gaussian(1.0), validation=None, progress=False,
    )  # fmt: skip
    return between(fit, 0.2 * length)[0]


def stochastic(length: int, *, method: str, net: str, batch: int, engine: str) -> float:
    """A step of one chain while it samples, one draw kept of ten."""
    import doxa

    lengths = {"burn_in": 20, "draws": max(3, length // 10), "thin": 10}
    fit = partial(
        doxa.fit, network(net), rows_of(*sizes(net)), doxa.get_method(method)(**lengths),
        members=1, batch_size=batch, lr=1e-5, engine=engine, schedule="constant",
        likelihood=doxa.Gaussian(1.0), progress=False,
    )  # fmt: skip
    return between(fit, 20 + 0.2 * length)[0]


def gradient(length: int, *, method: str, engine: str, **settings: Any) -> float:
    """A gradient of eight chains, 512 rows: a step while it samples, by its leapfrog steps."""
    import doxa

    x, _ = rows_of(8, n=512)
    fit = partial(
        doxa.fit, network("8-50-1", "tanh"), (x, x[:, :1].sin()),
        doxa.get_method(method)(draws=max(10, length), burn_in=20, **settings), members=8,
        engine=engine, likelihood=doxa.Gaussian(0.5), prior=doxa.Normal(1.0), progress=False,
    )  # fmt: skip
    seconds, posterior = between(fit, 20 + 0.2 * length)
    # All chains wait for the longest trajectory.
    leapfrogs = posterior.record.stats["leapfrogs"].double().amax(0)
    return seconds / float(leapfrogs[len(leapfrogs) // 5 :].mean())


@cache
def fitted(kind: str) -> Any:
    """The posterior that predicts."""
    import torch
    from torch import nn

    import doxa

    x, y = rows_of(9, n=100)
    if kind == "members":
        net, options = network("9-50-1"), {"members": 100}
    else:
        net, options = nn.Sequential(
            nn.Linear(9, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 50),
            nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1),
        ), {}  # fmt: skip
    method = "map" if kind == "members" else "mc-dropout"
    with torch.random.fork_rng(devices=[]):
        return doxa.fit(net, (x, y), method, steps=5, progress=False, **options)


def prediction(length: int, *, kind: str, n: int) -> float:
    """The mean of 100 samples at n rows."""
    posterior, (x, _) = fitted(kind), rows_of(9)
    return per_call(lambda: posterior.predict(x[:n]).mean, length)


def overhead(length: int) -> float:
    """A whole fit of one step: 16 rows, 2-4-1."""
    import doxa

    net, data = network("2-4-1"), rows_of(2, n=16)
    return per_call(lambda: doxa.fit(net, data, "map", steps=1, progress=False), length)


def per_call(call: Callable[[], Any], times: int) -> float:
    """Seconds per call, after one call that is not counted."""
    call()
    start = clock()
    for _ in range(times):
        call()
    return (clock() - start) / times


def every_row() -> dict[str, Row]:
    uci = {"net": "9-50-1", "batch": 32, "n": 455}
    large = {"net": "784-400-400-10", "batch": 128}
    modes = ("eager", "traced", "compiled")
    rows: dict[str, Row] = {}
    for members, lengths in {10: (500, 600, 2500), 100: (150, 200, 700)}.items():
        for mode, length in zip(modes, lengths, strict=True):
            each = partial(training, method="map", members=members, engine=f"stack:{mode}", **uci)
            rows[f"map 9-50-1 M={members} {mode}"] = Row(each, length)
    one = partial(training, method="map", members=1, engine="auto", **uci)
    rows["map 9-50-1 M=1 auto"] = Row(one, 1500)
    for mode in modes[:2]:
        each = partial(training, method="mean-field", members=1, engine=f"loop:{mode}", **large)
        rows[f"mean-field 784-400-400-10 M=1 {mode}"] = Row(each, 60)
    for method in ("map", "ivon"):
        each = partial(training, method=method, members=1, engine="loop:traced", **large)
        rows[f"{method} 784-400-400-10 M=1 traced"] = Row(each, 100)
    # The rule compiles stages of 10,000 steps and more only, whose numbers are not drawn ahead.
    for mode, length in zip(modes, (400, 500, 12_000), strict=True):
        each = partial(training, method="mean-field", members=10, engine=f"stack:{mode}", **uci)
        rows[f"mean-field 9-50-1 M=10 {mode}"] = Row(each, length)
    for mode, length in zip(modes[:2], (400, 500), strict=True):
        each = partial(training, method="mc-dropout", members=10, engine=f"stack:{mode}", **uci)
        rows[f"mc-dropout 9-50-1 M=10 {mode}"] = Row(each, length)
    chains = {"8-50-50-1": (32, 1500), "8-96-96-1": (32, 1200), "784-400-400-10": (128, 100)}
    for method in ("sgld", "sghmc"):
        for net, (batch, length) in chains.items():
            each = partial(stochastic, method=method, net=net, batch=batch, engine="loop:traced")
            rows[f"{method} {net} traced"] = Row(each, length)
    for mode, length in zip(("eager", "compiled"), (20, 50), strict=True):
        hmc = partial(gradient, method="hmc", engine=f"stack:{mode}", leapfrog=20)
        rows[f"hmc 8-50-1 8 chains {mode}"] = Row(hmc, length, "gradient")
        nuts = partial(gradient, method="nuts", engine=f"stack:{mode}", max_depth=4)
        rows[f"nuts 8-50-1 8 chains {mode}"] = Row(nuts, length, "gradient")
    for n, length in {1: 300, 32: 250, 1000: 40}.items():
        each = partial(prediction, kind="members", n=n)
        rows[f"predict 9-50-1 S=100 N={n}"] = Row(each, length, "call")
    late = partial(prediction, kind="dropout", n=1000)
    rows["predict dropout before the last layer N=1000"] = Row(late, 25, "call")
    rows["fit of one step"] = Row(overhead, 30, "call")
    return rows


def serve() -> None:
    """Time the rows whose names come in, one line each."""
    import torch

    torch.set_num_threads(1)
    known = every_row()
    for line in sys.stdin:
        row = known[line.strip()]
        gc.collect()
        try:
            answer: Result = {"seconds": row.call(row.length)}
        except Exception as error:  # a version that cannot do a row does the others
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class Worker:
    """One version of doxa in a process of its own."""

    def __init__(self, source: str, which_clock: str) -> None:
        alone = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
        environment = {**os.environ, **dict.fromkeys(alone, "1"), "PYTHONPATH": source}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--clock", which_clock], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def time(self, name: str) -> Result:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(name, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else {"error": "the process ended"}

    def close(self) -> None:
        self.process.communicate()


def measure(sources: Sequence[str], names: Sequence[str], args: argparse.Namespace) -> list[Result]:
    """For each row the times of both versions, taken in turns."""
    found: dict[str, Result] = {
        name: {"row": name, "old": [], "new": [], "errors": {}} for name in names
    }
    end = time.perf_counter() + 60 * args.minutes
    for round_ in range(args.rounds):
        workers = {
            which: Worker(source, args.clock)
            for which, source in zip(("old", "new"), sources, strict=True)
        }
        for name in names:
            row, began = found[name], time.perf_counter()
            if began > end:
                break
            for pair in range(args.pairs):
                order = ("old", "new") if (pair + round_) % 2 == 0 else ("new", "old")
                for which in order:
                    answer = {} if which in row["errors"] else workers[which].time(name)
                    if "seconds" in answer:
                        row[which].append(answer["seconds"])
                    elif "error" in answer:
                        row["errors"][which] = answer["error"]
            took = time.perf_counter() - began
            times = {which: [round(1e6 * s) for s in row[which]] for which in workers}
            line = f"round {round_ + 1}, {name}: {took:.1f} s, µs: {times}"
            print(line, file=sys.stderr, flush=True)
        for worker in workers.values():
            worker.close()
    return [finished(row) for row in found.values() if row["old"] or row["errors"]]


def finished(row: Result) -> Result:
    row["unit"] = every_row()[row["row"]].unit
    if row["errors"] or not row["old"]:
        return row
    pairs = list(zip(row["old"], row["new"], strict=True))
    row["ratio"] = statistics.median(new / old for old, new in pairs)
    row["ratio_of_smallest"] = min(row["new"]) / min(row["old"])
    return row


def table(found: Sequence[Result]) -> str:
    """µs; for people."""
    lines = [
        "| µs | a | old, median | new, median | old, min | new, min | new/old | of the min |",
        "|---" * 8 + "|",
    ]
    for row in found:
        if "ratio" not in row:
            errors = "; ".join(f"{k}: {v}" for k, v in row["errors"].items())
            lines.append(f"| {row['row']} | {row['unit']} | {errors} |" + " |" * 5)
            continue
        times = [f(row[which]) * 1e6 for f in (statistics.median, min) for which in ("old", "new")]
        cells = [f"{each:,.0f}" for each in times]
        cells += [f"{row['ratio']:.3f}", f"{row['ratio_of_smallest']:.3f}"]
        lines.append(f"| {row['row']} | {row['unit']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    global clock
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", nargs="*", metavar="SRC", help="the old one and the new one")
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes each")
    parser.add_argument("--pairs", type=int, default=3, help="times of each version in a round")
    parser.add_argument("--rows", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu")
    parser.add_argument("--out", type=Path, help="JSON of all times")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    clock = CLOCKS[args.clock]
    if args.serve:
        serve()
        return
    if len(args.sources) != 2:
        parser.error("give two folders: OLD_SRC NEW_SRC")
    chosen = tuple(args.rows.split(","))
    known = list(every_row())
    names = list(dict.fromkeys(n for start in chosen for n in known if n.startswith(start)))
    if not names:
        parser.error(f"no such row; there are {', '.join(known)}")
    found = measure([str(Path(source).resolve()) for source in args.sources], names, args)
    print(table(found))
    if args.out is not None:
        about = {"rounds": args.rounds, "pairs": args.pairs, "clock": args.clock, "threads": 1}
        args.out.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
