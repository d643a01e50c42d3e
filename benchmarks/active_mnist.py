"""Active learning on MNIST, in the protocol of Gal, Islam & Ghahramani (2017), on a GPU.

    python benchmarks/active_mnist.py --device cuda --minutes 9 --out active_mnist
    python benchmarks/active_mnist.py --tiny --out tiny                 # a try on the CPU

Two convolutions of 32 filters of 4 × 4, dropout of 0.25 and 0.5, 20 balanced labels at first, 10
more a round, 100 masks, the 10,000 test images. What differs from the paper: a round scores a
random part of the pool (--sample), a fit is --steps steps of Adam from fresh weights and no weight
decay is tuned. Three parts, each a process of its own (--parts):

    gal       labels to 10 % and 5 % error for six acquisitions, all seeds in one stacked fit
    repeated  a pool that holds every image three times, with noise (Kirsch et al. 2019): BALD asks
              the same thing again and again, BatchBALD does not
    equal     BALD with MC dropout, snapshot and deep ensembles, each with the same number of
              gradients a round

Every round writes PART.json (curves, chosen rows); the end, or --minutes, tables and figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import doxa
from doxa.decide.active import Learned, learn

PARTS = ("gal", "repeated", "equal")
WAYS = ("variation_ratio_of_mean", "bald", "max_entropy", "mean_std", "random", "batch_bald")
PUBLISHED = {  # labels to 10 % and 5 % error: Gal et al. (2017); BatchBALD: Kirsch et al. (2019)
    "variation_ratio_of_mean": (120, 295), "bald": (145, 335), "max_entropy": (165, 355),
    "mean_std": (230, 695), "random": (255, 835), "batch_bald": (105, 225),
}  # fmt: skip


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 4), nn.ReLU(), nn.Conv2d(32, 32, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(32 * 11 * 11, 128), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def images(asked: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with np.load(asked.data / "mnist.npz") as file:
        raw = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}

    def pixels(name: str) -> Tensor:
        x = torch.from_numpy(raw[name]).float()
        x = x / 255.0 if float(x.max()) > 1.5 else x
        return x.reshape(-1, 1, 28, 28).to(asked.device)

    y, y_test = (torch.from_numpy(raw[name]).long() for name in ("y_train", "y_test"))
    return pixels("x_train"), y, pixels("x_test")[: asked.test], y_test[: asked.test]


def balanced(y: Tensor, seeds: list[int], each: int = 2) -> list[list[int]]:
    """So many rows of every class, for each seed."""
    starts = []
    for seed in seeds:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        starts.append([int(r) for c in range(10) for r in order[y[order] == c][:each]])
    return starts


class Watch:
    """After each round: a line, a file, and the end of the time."""

    def __init__(self, part: str, asked: argparse.Namespace, until: float) -> None:
        self.part, self.out, self.until, self.began = part, asked.out, until, time.time()
        self.rounds, self.found = 0, {}

    def __call__(self, found: Learned, name: str = "") -> bool:
        at = [one.curve[-1] for one in found.learners if one.curve]
        if at and all(len(one.book.asked) or one.book.stopped for one in found.learners):
            self.rounds += 1
            accuracy = {}
            for one in found.learners:
                accuracy.setdefault(one.by, []).append(one.curve[-1]["accuracy"])
            said = " ".join(f"{by} {sum(v) / len(v):.3f}" for by, v in accuracy.items())
            labels = max(r["labels"] for r in at)
            left = sum(not one.book.stopped for one in found.learners)
            print(f"[{self.part}{name} {time.time() - self.began:.0f} s] {labels} labels, {left} "
                  f"runs: {said}", flush=True)  # fmt: skip
            self.found[name or "all"] = found.to_json()
            write(self.out / f"{self.part}.json", self.found)
        return time.time() > self.until


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def options(asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "likelihood": "categorical", "batch_size": asked.batch, "lr": asked.lr, "validation": None,
        "engine": asked.engine, "n": 100 if not asked.tiny else 10, "step": 10, "progress": False,
        "metric": "accuracy",
    }  # fmt: skip


def race(asked: argparse.Namespace, x: Tensor, y: Tensor) -> str:
    """The faster of two engines on a fit of the size to come: convolutions of many networks as one
    grouped convolution, or one network after the other, both as a graph."""
    rows = [torch.arange(60 * i, 60 * i + 60) for i in range(len(WAYS) * asked.seeds)]
    most = int(rows[-1][-1]) + 1
    seconds = {}
    for engine in ("loop:graph", "stack:graph"):
        for steps in (3, 120):  # the first warms up
            begin = time.perf_counter()
            try:
                doxa.fit(
                    net().to(asked.device), (x[:most], y[:most]), "map", steps=steps,
                    runs=doxa.Runs(rows=rows), likelihood="categorical", engine=engine,
                    batch_size=asked.batch, validation=None, progress=False,
                )  # fmt: skip
            except Exception as error:  # whatever goes wrong: the other one
                print(f"{engine} fails: {error}", flush=True)
                break
            seconds[engine] = time.perf_counter() - begin
    print(f"seconds for 120 steps of {len(rows)} networks: {seconds}", flush=True)
    return min(seconds, key=lambda name: seconds[name]) if seconds else "auto"


def gal(asked: argparse.Namespace, until: float) -> None:
    x, y, x_test, y_test = images(asked)
    if asked.engine == "race":
        asked.engine = race(asked, x, y)
    seeds = list(range(asked.seeds))
    learn(
        net().to(asked.device), x, y, "mc-dropout", by=list(WAYS), seeds=seeds,
        start=balanced(y, seeds), target=0.951, budget=asked.labels, test=(x_test, y_test),
        sample=asked.sample, callback=Watch("gal", asked, until), steps=asked.steps,
        **options(asked),
    )  # fmt: skip


def repeated(asked: argparse.Namespace, until: float) -> None:
    """Each of some images three times, with noise of standard deviation 0.1."""
    x, y, x_test, y_test = images(asked)
    source = torch.Generator().manual_seed(0)
    some = torch.randperm(len(x), generator=source)[: asked.sample // 3]
    copies = some.repeat(3)
    noise = 0.1 * torch.randn(len(copies), 1, 28, 28, generator=source)
    pool, labels = x[copies.to(x.device)] + noise.to(x.device), y[copies]
    seeds = list(range(asked.seeds))
    learn(
        net().to(asked.device), pool, labels, "mc-dropout", by=["batch_bald", "bald", "random"],
        seeds=seeds, start=balanced(labels, seeds), budget=min(asked.labels, 320),
        test=(x_test, y_test), callback=Watch("repeated", asked, until), steps=asked.steps,
        **options(asked),
    )  # fmt: skip


def equal(asked: argparse.Namespace, until: float) -> None:
    """The same number of gradients a round: five cycles of equal shares of one run, the same
    shares for members of their own, or all of it for one dropout network."""
    x, y, x_test, y_test = images(asked)
    seeds, steps, size = list(range(asked.seeds)), 2 * asked.steps, 5
    begun, share = time.time(), (until - time.time()) / 3
    watch = Watch("equal", asked, until)
    methods = {
        "snapshot": (doxa.SnapshotEnsemble(size=size), {"steps": steps}),
        "mc-dropout": (doxa.MCDropout(), {"steps": steps}),
        "deep-ensemble": (doxa.DeepEnsemble(), {"steps": steps // size, "members": size}),
    }
    for i, (name, (method, own)) in enumerate(methods.items()):
        watch.until = begun + (i + 1) * share

        def callback(found: Learned, name: str = name) -> bool:
            return watch(found, f" {name}")

        learn(
            net().to(asked.device), x, y, method, by=["bald"], seeds=seeds,
            start=balanced(y, seeds), target=0.951, budget=min(asked.labels, 420),
            test=(x_test, y_test), sample=asked.sample, callback=callback, **own,
            **options(asked),
        )  # fmt: skip


def first(curve: list[dict[str, Any]], accuracy: float) -> float:
    return next((r["labels"] for r in curve if r["accuracy"] >= accuracy), float("inf"))


def table(part: str, found: dict[str, Any]) -> str:
    """Median labels to 90 % and 95 %, over seeds; inf where most runs did not get there."""
    lines = ["| chosen by | to 10 % | to 5 % | published | at the end: labels, % wrong |"]
    lines += ["|---|---|---|---|---|"]
    for name, one in found.items():
        for by in dict.fromkeys(run["by"] for run in one["runs"]):
            curves = [run["curve"] for run in one["runs"] if run["by"] == by]
            reach = [np.median([first(c, a) for c in curves]) for a in (0.90, 0.95)]
            wrong = 100 * (1 - np.mean([c[-1]["accuracy"] for c in curves]))
            most = np.median([c[-1]["labels"] for c in curves])
            known = PUBLISHED.get(by) if part == "gal" else None
            said = "/".join(map(str, known)) if known else ""
            head = by if name == "all" else f"{name.strip()}, {by}"
            lines.append(
                f"| {head} | {reach[0]:g} | {reach[1]:g} | {said} | {most:g}, {wrong:.1f} |"
            )
    return "\n".join(lines)


def figure(out: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no figure")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    there = [part for part in PARTS if (out / f"{part}.json").exists()]
    drawn, axes = plt.subplots(1, len(there), figsize=(5 * len(there), 4), squeeze=False)
    for axis, part in zip(axes[0], there, strict=True):
        for name, one in json.loads((out / f"{part}.json").read_text()).items():
            for by in dict.fromkeys(run["by"] for run in one["runs"]):
                curves = [run["curve"] for run in one["runs"] if run["by"] == by]
                labels = sorted({r["labels"] for c in curves for r in c})
                # a run that has reached its aim stays where it was
                last = lambda c, k: [r for r in c if r["labels"] <= k][-1]["accuracy"]  # noqa: E731
                mean = [100 * (1 - np.mean([last(c, k) for c in curves])) for k in labels]
                axis.plot(labels, mean, label=by if name == "all" else name.strip())
        axis.set(yscale="log", xlabel="labels", ylabel="% of test images wrong", title=part)
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.tick_params(axis="y", which="both", labelsize=8)
        axis.legend(fontsize=8)
    drawn.tight_layout()
    drawn.savefig(out / "active_mnist.png", dpi=110)


def everything(asked: argparse.Namespace) -> None:
    """Each part in a process of its own, then tables and figures."""
    command = [sys.executable, __file__, *sys.argv[1:]]
    running = [subprocess.Popen([*command, "--only", part]) for part in asked.parts.split(",")]
    for process in running:
        process.wait()
    draw(asked)


def draw(asked: argparse.Namespace) -> None:
    report = []
    for part in asked.parts.split(","):
        path = asked.out / f"{part}.json"
        if path.exists():
            report.append(f"## {part}\n\n{table(part, json.loads(path.read_text()))}\n")
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "tables.md").write_text("\n".join(report))
    print("\n".join(report), flush=True)
    figure(asked.out)


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--data", type=Path, default=Path(os.environ.get("DOXA_DATA", "shared/data")))
    ask.add_argument("--out", type=Path, default=Path("active_mnist"))
    ask.add_argument("--parts", default=",".join(PARTS))
    ask.add_argument("--only", choices=PARTS)
    ask.add_argument("--draw", action="store_true", help="of what --out holds, without a fit")
    ask.add_argument("--minutes", type=float, default=9.0)
    ask.add_argument("--seeds", type=int, default=5)
    ask.add_argument("--steps", type=int, default=200)
    ask.add_argument("--lr", type=float, default=1e-3)
    ask.add_argument("--batch", type=int, default=64)
    ask.add_argument("--labels", type=int, default=1000)
    ask.add_argument("--sample", type=int, default=6000)
    ask.add_argument("--test", type=int, default=10_000)
    ask.add_argument("--engine", default="auto")
    ask.add_argument("--tiny", action="store_true", help="a try: few of everything")
    asked = ask.parse_args()
    if asked.tiny:
        asked.seeds, asked.steps, asked.labels, asked.sample, asked.test = 1, 10, 40, 120, 100
    torch.set_float32_matmul_precision("high")
    if asked.draw:
        draw(asked)
    elif asked.only:
        # the tables are written after that
        until = time.time() + 60 * asked.minutes - 30
        {"gal": gal, "repeated": repeated, "equal": equal}[asked.only](asked, until)
    else:
        everything(asked)


if __name__ == "__main__":
    main()
