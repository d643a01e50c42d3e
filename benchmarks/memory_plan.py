"""What `doxa.plan` announces, beside what a fit then takes: peak memory and seconds.

    python -m benchmarks.memory_plan [--only NAME[,NAME...]] [--out FILE]

Each row is a fit in a process of its own, on one thread: 1,024 rows of 64 numbers, a network
64-h-h-1 with two hidden layers of h, 40 steps of 32 rows. A fit of a small network by the same
method comes first, so that what torch and Python take once is not counted. The peak is that of the
resident memory above the memory before the fit; it includes everything until `fit` returns, also
the checks of the posterior on held-out rows. `planned` is the sum of the plan for the same
arguments. Seconds are of gradients in the plan, and beside it of the steps and of the whole fit.
Members in the loop engine are trained one after the other; the time of their steps is not known.

A dash in place of the planned seconds: the plan had none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import doxa

HERE = Path(__file__).parent
Row = dict[str, Any]

STEPS = {"steps": 40, "batch_size": 32, "progress": False}
HELD = {"validation": 0.1}
ALONE = {"members": 1} | HELD


def _chains(kind: Callable[..., Any], draws: int) -> Callable[[], Any]:
    return lambda: kind(draws=draws, burn_in=5, thin=1)


# name: the method, hidden units, and arguments of `fit`
CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], dict[str, Any]]] = {
    "map": (doxa.MAP, (512, 1400), ALONE),
    "map loop": (doxa.MAP, (300, 700), HELD | {"members": 4, "engine": "loop"}),
    "ivon": (doxa.IVON, (512, 1400), ALONE),
    "mean-field": (doxa.MeanField, (512, 1400), ALONE),
    "mean-field local": (lambda: doxa.MeanField(estimator="local"), (512, 1400), ALONE),
    "laplace diagonal": (lambda: doxa.Laplace(structure="diagonal"), (256, 512), ALONE),
    "laplace kronecker": (lambda: doxa.Laplace(structure="kronecker"), (256, 512), ALONE),
    "laplace last layer": (
        lambda: doxa.Laplace(structure="full"), (256, 1024), ALONE | {"subset": "last_layer"},
    ),
    "laplace full": (lambda: doxa.Laplace(structure="full"), (10, 20), ALONE),
    "swag": (lambda: doxa.SWAG(rank=8, cycle=1), (512, 1200), ALONE),
    "deep-ensemble loop": (lambda: doxa.DeepEnsemble(), (300, 1100), HELD | {"engine": "loop"}),
    "ten members in turn": (
        lambda: doxa.DeepEnsemble(), (970,), HELD | {"engine": "loop", "members": 10},
    ),
    "ivon in turn": (doxa.IVON, (970,), HELD | {"engine": "loop", "members": 4}),
    "deep-ensemble stack": (lambda: doxa.DeepEnsemble(), (128, 300), HELD | {"engine": "stack"}),
    "sgld": (_chains(doxa.SGLD, 40), (300, 1100), {"members": 2}),
    "hmc": (_chains(doxa.HMC, 20), (128, 400), {"members": 2}),
    "mc-dropout": (doxa.MCDropout, (512, 1200), ALONE),
}  # fmt: skip


def network(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )


def rows(count: int = 1024) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 64, generator=g)
    return x, x[:, 0].sin() + 0.1 * torch.randn(count, generator=g)


def resident(key: str) -> int:
    """A figure of this process, in bytes: "VmRSS" (now) or "VmHWM" (at most so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {key}")


def measured(name: str, hidden: int, changes: dict[str, Any] | None = None) -> Row:
    """In a process of its own: the plan, and the peak and the seconds of the fit. `changes` are
    arguments in place of those of the case."""
    make, _, options = CASES[name]
    settings = STEPS | options | (changes or {})
    doxa.fit(network(8), rows(), make(), **settings)
    found = doxa.plan(network(hidden), rows(), make(), **settings)
    net, data = network(hidden), rows()
    gc.collect()
    with contextlib.suppress(OSError):  # the highest so far is that of now
        Path("/proc/self/clear_refs").write_text("5")
    marks: list[tuple[int, float]] = []

    def noted(step: int, _info: Any) -> None:
        if step <= settings["steps"]:  # not the stages after it
            marks.append((step, time.perf_counter()))

    # Callbacks see all members, which are then trained together: not where each is trained alone.
    callbacks = [] if settings.get("engine") == "loop" else [noted]
    before, began = resident("VmRSS"), time.perf_counter()
    doxa.fit(net, data, make(), **settings, callbacks=callbacks)
    seconds, peak = time.perf_counter() - began, resident("VmHWM") - before
    steps = None
    if len(marks) > 1:
        (first, start), (last, end) = marks[0], marks[-1]
        steps = (end - start) / (last - first) * last
    return {
        "work": name, "hidden": hidden, "weights": found.weights, "members": found.members,
        "peak": peak, "planned": found.bytes, "ratio": found.bytes / peak,
        "parts": dict(found.memory), "smaller": dict(found.smaller),
        "seconds": seconds, "step_seconds": steps, "planned_seconds": found.seconds,
    }  # fmt: skip


def in_process(name: str, hidden: int, changes: dict[str, Any] | None = None) -> Row:
    command = [sys.executable, "-m", "benchmarks.memory_plan", "--row", name, str(hidden)]
    command += ["--changes", json.dumps(changes)] if changes else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def shown(row: Row) -> str:
    mib = {key: row[key] / 2**20 for key in ("peak", "planned")}
    time = row["planned_seconds"]
    planned = f"{time[0]:.2g}–{time[1]:.2g}" if time and time[0] != time[1] else "–"
    planned = f"{time[0]:.2g}" if time and time[0] == time[1] else planned
    steps = f"{row['step_seconds']:.2g}" if row["step_seconds"] else "–"
    return (
        f"{row['work']:30s} {row['members']} × {row['weights']:9,}  peak {mib['peak']:7.1f} MiB  "
        f"planned {mib['planned']:7.1f}  {row['ratio']:.2f}×  {row['seconds']:6.2f} s, "
        f"steps {steps} s, planned {planned} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="rows whose names begin with one of these")
    parser.add_argument("--row", nargs=2, metavar=("NAME", "HIDDEN"), help="be one row's process")
    parser.add_argument("--changes", type=json.loads, default=None)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "memory_plan.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.row:
        name, hidden = arguments.row
        print(json.dumps(measured(name, int(hidden), arguments.changes)))
        return
    wanted = tuple(arguments.only.split(","))
    before = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    found = {(row["work"], row["hidden"]): row for row in before}
    for name, (_, sizes, _) in CASES.items():
        for hidden in sizes if name.startswith(wanted) else ():
            found[name, hidden] = row = in_process(name, hidden)
            print(shown(row), flush=True)
            machine = {"torch": torch.__version__, "processor": platform.machine()}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            content = {"rows": list(found.values()), "machine": machine}
            arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
