"""A network of 21 million weights: time of a step and memory of a fit, beside plain PyTorch.

    python -m benchmarks.large [--rows map,ivon,sgld,sghmc,mean-field,local,draw,memory,epilogue]

The network is 1024-4096-4096-10, in batches of 32, on one thread. All figures are ratios.

**Time.** The callback of a fit runs steps of plain PyTorch with fused Adam, and one draw of as many
normals (`normal_`, into memory that is already in use), between the steps of doxa: both are timed
in turns, in one process. A step of doxa includes everything that a fit does per step and, every
tenth step, the check of the weights. For a method that draws a normal per weight per step, the
ratio is that to a plain step and one draw.

**Draw.** The normals of a step as `sgld` reads them, in blocks of columns, beside `normal_` for as
many numbers, in turns.

**Memory.** Each row has a process of its own. The peak is that of the resident memory above the
memory of the process in which the network and one pass through it exist already. `announced` is
the estimate with which `fit` decides whether it starts.

**Epilogue.** The time after the last step (the bound, and the checks of the posterior), beside
1,000 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import doxa
from doxa.noise import Noise, PrefetchedNoise
from doxa.vi.gaussian import columns

HERE = Path(__file__).parent
BATCH = 32
Row = dict[str, Any]

METHODS: dict[str, Callable[[], Any]] = {
    "map": doxa.MAP,
    "ivon": doxa.IVON,
    "sgld": lambda: doxa.SGLD(draws=1, burn_in=39, thin=1),
    "sghmc": lambda: doxa.SGHMC(draws=1, burn_in=39, thin=1),
    "mean-field": lambda: doxa.MeanField(average=0.0, elbo_samples=1),
    "local": lambda: doxa.MeanField(average=0.0, elbo_samples=1, estimator="local"),
}
EPILOGUES = ("mean-field", "ivon")
DRAWS = ("ivon", "sgld", "sghmc")  # a normal per weight per step
STEPS = 70


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(640, 1024, generator=g), torch.randint(10, (640,), generator=g)


def plain_step(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One training step, as one would write it by hand."""
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        part = torch.randint(len(x), (BATCH,))
        loss = F.cross_entropy(net(x[part]), y[part])
        adam.zero_grad()
        loss.backward()
        adam.step()

    return step


def fit(net: nn.Module, name: str, **options: Any) -> Any:
    settings = {
        "steps": STEPS, "batch_size": BATCH, "lr": 1e-4, "schedule": "constant", "members": 1,
        "likelihood": "categorical", "progress": False, "validation": None,
    } | options  # fmt: skip
    return doxa.fit(net, rows(), METHODS[name](), **settings)


class _Enough(Exception):
    """All steps have been timed: what comes after them is not."""


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def timed(name: str) -> Row:
    """The time of a step of doxa, of plain PyTorch and of one draw, in turns."""
    net, (x, y) = network(), rows()
    plain = plain_step(network(), x, y)
    numbers = torch.empty(sum(p.numel() for p in net.parameters()))
    plain()
    marks: list[tuple[int, float, float]] = []  # step, when doxa's steps ended and began again
    others: list[tuple[float, float]] = []  # of plain PyTorch, and of a draw

    def beside(step: int, _info: Any) -> None:
        ended = time.perf_counter()
        if step < STEPS:
            steps = [seconds(plain) for _ in range(5)]
            others.append((statistics.median(steps), seconds(numbers.normal_)))
        marks.append((step, ended, time.perf_counter()))
        if step >= STEPS:
            raise _Enough

    with contextlib.suppress(_Enough):
        fit(net, name, callbacks=[beside])
    ours = [(b[1] - a[2]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks) if b[0] - a[0] > 1]
    step, draw = (statistics.median(v) for v in zip(*others, strict=True))
    own = statistics.median(ours)
    base = step + draw if name in DRAWS else step
    return {"work": name, "plain": step, "draw": draw, "doxa": own, "ratio": own / base}


def draw() -> Row:
    """The time of a draw of as many normals as there are weights, and that of `normal_`."""
    size = sum(p.numel() for p in network().parameters())
    noise, numbers = PrefetchedNoise(Noise(0, "draw", ["0"])), torch.empty(size)

    def blocks(step: int) -> None:
        following = noise.stream(0, size, torch.tensor(step), 1)
        for part in columns(size):
            following(part.stop - part.start)

    pairs = [(seconds(lambda t=t: blocks(t)), seconds(numbers.normal_)) for t in range(15)]
    own, plain = (statistics.median(v) for v in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return {"work": "draw", "normal_": plain, "doxa": own, "ratio": ratio}


def epilogue(name: str, held_out: bool) -> Row:
    """The time after the last step of a fit, beside that of 1,000 steps."""
    marks: list[float] = []

    def noted(_step: int, _info: Any) -> None:
        marks.append(time.perf_counter())

    fit(network(), name, steps=40, validation=0.1 if held_out else None, callbacks=[noted])
    after = time.perf_counter() - marks[-1]
    steps = statistics.median(b - a for a, b in itertools.pairwise(marks)) / 10 * 1000
    return {
        "work": name, "held_out": held_out, "after": after, "steps": steps, "ratio": after / steps,
    }  # fmt: skip


def resident(key: str) -> int:
    """A figure of this process, in bytes: "VmRSS" (now) or "VmHWM" (at most so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {key}")


def peak(name: str, held_out: bool) -> Row:
    """In a process of its own: the memory of a fit, or of plain PyTorch."""
    net, (x, y) = network(), rows()
    with torch.no_grad():
        net(x[:BATCH])
    announced = 0
    if name != "plain":
        kind = type(METHODS[name]())
        planned = kind.planned_bytes

        def recorded(self: Any, work: Any) -> int:
            nonlocal announced
            announced = planned(self, work)
            return announced

        kind.planned_bytes = recorded
    before = resident("VmRSS")
    if name == "plain":
        step = plain_step(net, x, y)
        for _ in range(5):
            step()
    else:
        fit(net, name, steps=40, validation=0.1 if held_out else None)
    used = resident("VmHWM") - before
    copy = 4 * sum(p.numel() for p in net.parameters())
    return {"work": name, "held_out": held_out, "peak": used, "copy": copy, "announced": announced}


def memory(names: list[str]) -> list[Row]:
    found = []
    for name, held_out in [("plain", False), *itertools.product(names, (False, True))]:
        command = [sys.executable, "-m", "benchmarks.large", "--peak", name]
        command += ["--held-out"] if held_out else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        found.append(row)
        plain, copy = found[0]["peak"], row["copy"]
        row["allowed"] = plain + (1 + held_out) * copy + 0.1 * plain
        if name != "plain":
            row["ratio"] = row["peak"] / row["allowed"]
        print(show_memory(row), flush=True)
    return found


def show_memory(row: Row) -> str:
    mib = {k: row[k] / 2**20 for k in ("peak", "allowed", "announced")}
    text = f"{row['work']:12s} {'held out' if row['held_out'] else '':9s} {mib['peak']:7.0f} MiB"
    if row["work"] == "plain":
        return text
    off = mib["announced"] / mib["peak"]
    return f"{text}, allowed {mib['allowed']:5.0f} ({row['ratio']:.2f}×), announced {off:.2f}×"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=",".join([*METHODS, "draw", "memory", "epilogue"]))
    parser.add_argument("--memory-of", default=",".join(METHODS), help="methods of the memory rows")
    parser.add_argument("--peak", help="be the process of one memory row")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "large.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        print(json.dumps(peak(arguments.peak, arguments.held_out)))
        return
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.rows.split(","):
        if name == "epilogue":
            found[name] = [epilogue(m, held) for m in EPILOGUES for held in (False, True)]
            for row in found[name]:
                print(
                    f"{row['work']:12s} {'held out' if row['held_out'] else '':9s} after the steps "
                    f"{row['after']:.0f} s, 1,000 steps {row['steps']:.0f} s: {row['ratio']:.2f}×"
                )
        elif name == "draw":
            found[name] = row = draw()
            print(f"{name:12s} {row['doxa'] * 1e3:.0f} ms, normal_ {row['normal_'] * 1e3:.0f} ms: "
                  f"{row['ratio']:.2f}×", flush=True)  # fmt: skip
        elif name == "memory":
            found[name] = memory(arguments.memory_of.split(","))
        else:
            found[name] = row = timed(name)
            parts = ", ".join(f"{k} {row[k] * 1e3:.0f} ms" for k in ("plain", "draw", "doxa"))
            print(f"{name:12s} {parts}: {row['ratio']:.2f}×", flush=True)
        found["machine"] = {"torch": torch.__version__, "processor": platform.machine()}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
