"""Active learning on MNIST, in the protocol of Gal, Islam & Ghahramani (2017), on a GPU.

    python -m benchmarks.active_mnist --device cuda --minutes 8 --parts settle,gal --out mnist
    python -m benchmarks.active_mnist --tiny --out tiny                 # a try on the CPU
    python -m benchmarks.active_mnist --draw --out benchmarks/results/active_mnist

Two convolutions of 32 filters of 4 × 4, dropout of 0.25 and 0.5, 20 balanced labels at first, 10
more per round, 100 masks, the 10,000 test images. The training settings are chosen on training
images that no session uses, before any test image is used. They are the same in every round of
every session, and each round starts from new weights. A round scores a random part of the pool
(--sample). Parts:

    settle    a grid over initial weights, prior, rate, steps and the scale of pixels; without it,
              the settings chosen before
    gal       labels to 10 % and 5 % error for six acquisitions
    repeated  a pool that holds every image three times, with noise (Kirsch et al. 2019): BALD
              chooses near-duplicates, BatchBALD does not
    equal     BALD with MC dropout, snapshot and deep ensembles, each with the same number of
              gradients per round, for each of --budgets

Seeds of each part are distributed over --processes. While they run, every round of process i writes
OUT/PART-i.json (curves, chosen rows) and the folder of the session: the same command continues
where the time limit ended it. At the end all results are merged into OUT.json, from which the table
OUT.md and the figure OUT.png are made; --draw does only that.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
from doxa.decide.active.learn import scored
from doxa.store import write_text

WAYS = ("variation_ratio_of_mean", "bald", "max_entropy", "mean_std", "random", "batch_bald")
MEMBERS = 5
HELD_OUT = 5000  # training images that settle how to train; no session asks about them
GRID: dict[str, list[Any]] = {
    "scale": ["standard", "unit"], "init": ["glorot", "torch"], "sd": [1.0, 0.3, 3.0],
    "lr": [1e-3, 3e-3], "steps": [250, 750],
}  # fmt: skip
# The best of 250 steps in results/active_mnist.json, "settle"; 750 are better, and take longer.
SETTLED = {"scale": "standard", "init": "glorot", "sd": 1.0, "lr": 3e-3, "steps": 250, "batch": 64}
PARTS = {
    "gal": "six ways to ask, MC dropout", "repeated": "every image three times, MC dropout",
    "equal": "BALD, by gradients a round",
}  # fmt: skip
PUBLISHED = {  # labels to 10 % and 5 % error: Gal et al. (2017); BatchBALD: Kirsch et al. (2019)
    "variation_ratio_of_mean": (120, 295), "bald": (145, 335), "max_entropy": (165, 355),
    "mean_std": (230, 695), "random": (255, 835), "batch_bald": (105, 225),
}  # fmt: skip

Curve = list[dict[str, Any]]


class GlorotLinear(nn.Linear):
    """Keras' first weights: uniform, of variance 2/(inputs + outputs)."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class GlorotConv2d(nn.Conv2d):
    """The same, where inputs and outputs count once for every place of the filter."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        assert self.bias is not None
        nn.init.zeros_(self.bias)


def net(settings: dict[str, Any]) -> nn.Sequential:
    """conv 32 of 4 × 4, conv 32 of 4 × 4, pooling, dropout ¼, 128 units, dropout ½, 10 classes."""
    keras = settings["init"] == "glorot"
    conv, dense = (GlorotConv2d, GlorotLinear) if keras else (nn.Conv2d, nn.Linear)
    return nn.Sequential(
        conv(1, 32, 4), nn.ReLU(), conv(32, 32, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), dense(32 * 11 * 11, 128), nn.ReLU(), nn.Dropout(0.5),
        dense(128, 10),
    )  # fmt: skip


@functools.cache
def images(folder: Path, device: str, scale: str = "unit") -> dict[str, tuple[Tensor, Tensor]]:
    """The pool, rows that settle the training (both of the training images), and the test rows."""
    with np.load(folder / "mnist.npz") as file:
        raw = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}

    def pair(kind: str) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(raw[f"x_{kind}"]).float().reshape(-1, 1, 28, 28)
        x = x / 255.0 if float(x.max()) > 1.5 else x
        x = (x - 0.1307) / 0.3081 if scale == "standard" else x
        return x.to(device), torch.from_numpy(raw[f"y_{kind}"]).long()

    (x, y), test = pair("train"), pair("test")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(123))
    held, pool = order[:HELD_OUT], order[HELD_OUT:]
    some = [(x[rows.to(x.device)], y[rows]) for rows in (pool, held)]
    return {"pool": some[0], "held out": some[1], "test": test}


def options(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """What `fit` is given, but for the steps."""
    return {
        "likelihood": "categorical", "prior": doxa.Normal(settings["sd"]), "validation": None,
        "batch_size": settings["batch"], "lr": settings["lr"], "progress": False,
        "engine": "auto" if device == "cpu" else "stack:graph",
    }  # fmt: skip


def settle(args: argparse.Namespace, until: float) -> None:
    """How to train, chosen by the error on held-out training rows: the mean over 100 and 250 random
    labels and three seeds. Writes settings.json, and every candidate into settle.json."""
    tried: list[dict[str, Any]] = []
    keys = list(GRID)
    for values in itertools.product(*GRID.values()):
        settings = SETTLED | dict(zip(keys, values, strict=True))
        settings |= {"steps": 10, "batch": 8} if args.tiny else {}
        settings["wrong"] = errors(args, settings)
        tried.append(settings)
        print(settings, flush=True)
        (args.out / "settle.json").write_text(json.dumps(tried, indent=1))
        if time.time() > until:
            break
    best = min(tried, key=lambda one: float(np.mean(one["wrong"])))
    print(f"settled: {best}", flush=True)
    (args.out / "settings.json").write_text(json.dumps(best))


def errors(args: argparse.Namespace, settings: dict[str, Any]) -> list[float]:
    """% of held-out training rows that are wrong, at 100 and at 250 random labels."""
    found = images(args.data, args.device, settings["scale"])
    x, y = found["pool"]
    seeds, counts = range(1 if args.tiny else 3), (100, 250)
    rows = [
        torch.randperm(len(y), generator=torch.Generator().manual_seed(1000 + seed))[:count]
        for count in counts
        for seed in seeds
    ]
    union = torch.cat(rows)
    starts = np.cumsum([0, *(len(own) for own in rows)])
    own = [torch.arange(a, b) for a, b in itertools.pairwise(starts)]
    sweep = doxa.fit(
        net(settings).to(args.device), (x[union.to(x.device)], y[union]), "mc-dropout",
        steps=settings["steps"], runs=doxa.Runs(rows=own), **options(settings, args.device),
    )  # fmt: skip
    test = found["held out"]
    if args.tiny:
        test = (test[0][:200], test[1][:200])
    wrong = [100 * (1 - scored(p, test, 10 if args.tiny else 50)["accuracy"]) for p in sweep]
    return [round(float(v.mean()), 2) for v in np.array(wrong).reshape(len(counts), -1)]


def balanced(y: Tensor, seeds: list[int], each: int = 2) -> list[list[int]]:
    """So many rows of every class, for each seed."""
    starts = []
    for seed in seeds:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        starts.append([int(r) for c in range(10) for r in order[y[order] == c][:each]])
    return starts


class Session:
    """What the sessions of a part share, and what is done after each round: a line, a file, and the
    end of the time."""

    def __init__(self, part: str, args: argparse.Namespace) -> None:
        self.part, self.args, self.began = part, args, time.time()
        self.until = self.began + 60 * args.minutes
        self.file = args.out / f"{part}-{args.index}.json"
        self.found = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.settings = json.loads((args.out / "settings.json").read_text())
        found = images(args.data, args.device, self.settings["scale"])
        (self.x, self.y), test = found["pool"], found["test"]
        self.test = (test[0][: args.test], test[1][: args.test])

    def learn(self, x: Tensor, y: Tensor, method: Any, name: str = "", **own: Any) -> None:
        def after(found: Learned) -> bool:
            rounds = [one.curve[-1] for one in found.learners if one.curve]
            asking = all(one.book.asked or one.book.stopped for one in found.learners)
            if rounds and asking:
                accuracy: dict[str, list[float]] = {}
                for one in found.learners:
                    accuracy.setdefault(one.by, []).append(one.curve[-1]["accuracy"])
                means = " ".join(f"{by} {sum(v) / len(v):.3f}" for by, v in accuracy.items())
                labels = max(r["labels"] for r in rounds)
                left = sum(not one.book.stopped for one in found.learners)
                print(f"[{self.part}-{self.args.index} {name} {time.time() - self.began:.0f} s] "
                      f"{labels} labels, {left} runs: {means}", flush=True)  # fmt: skip
                self.found[name] = found.to_json()
                write_text(self.file, json.dumps(self.found))
            return time.time() > self.until

        seeds = self.args.seeds
        learn(
            net(self.settings).to(self.args.device), x, y, method, seeds=seeds,
            start=balanced(y, seeds), step=10, test=self.test, callback=after, metric="accuracy",
            n=10 if self.args.tiny else 100,
            folder=self.args.out / f"{self.file.stem}{name.replace(' ', '-')}",
            **{"steps": self.settings["steps"], **own},
            **options(self.settings, self.args.device),
        )  # fmt: skip


def gal(args: argparse.Namespace) -> None:
    session = Session("gal", args)
    session.learn(
        session.x, session.y, "mc-dropout", by=list(WAYS), target=0.951, budget=args.labels,
        sample=args.sample,
    )  # fmt: skip


def repeated(args: argparse.Namespace) -> None:
    """Each of some images three times, with noise of standard deviation 0.1 (pixels in 0 … 1)."""
    session = Session("repeated", args)
    source = torch.Generator().manual_seed(0)
    some = torch.randperm(len(session.x), generator=source)[: args.sample // 2]
    copies = some.repeat(3)
    size = 0.1 / (0.3081 if session.settings["scale"] == "standard" else 1.0)
    noise = size * torch.randn(len(copies), 1, 28, 28, generator=source)
    x = session.x[copies.to(session.x.device)] + noise.to(session.x.device)
    session.learn(
        x, session.y[copies], "mc-dropout", by=["batch_bald", "bald", "random"],
        budget=min(args.labels, 320),
    )  # fmt: skip


def equal(args: argparse.Namespace) -> None:
    """The same number of gradients per round: five cycles of equal shares of one run, the same
    shares for members of their own, or all of it for one dropout network."""
    session = Session("equal", args)
    end, left = session.until, 3 * len(args.budgets)
    for steps in args.budgets:
        methods: dict[str, tuple[Any, dict[str, Any]]] = {
            "MC dropout": (doxa.MCDropout(), {"steps": steps}),
            "snapshots": (doxa.SnapshotEnsemble(snapshots=MEMBERS), {"steps": steps}),
            "deep ensemble": (
                doxa.DeepEnsemble(), {"steps": steps // MEMBERS, "members": MEMBERS},
            ),
        }  # fmt: skip
        for name, (method, own) in methods.items():
            session.until = time.time() + (end - time.time()) / left  # equal parts
            left -= 1
            session.learn(
                session.x, session.y, method, f"{name} {steps}", by=["bald"], target=0.951,
                budget=min(args.labels, 300), sample=args.sample, **own,
            )  # fmt: skip


def collected(out: Path) -> dict[str, Any]:
    """{PART-i: its sessions}: those of the folder in place of those of the file, which is then
    written."""
    file = out.with_name(f"{out.name}.json")
    found = json.loads(file.read_text()) if file.exists() else {}
    parts = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    if parts:
        found |= parts
        write_text(file, json.dumps(dict(sorted(found.items()))) + "\n")
    return found


def curves(results: dict[str, Any], part: str) -> dict[str, list[Curve]]:
    """{acquisition, or session and acquisition: the curve of each seed}, of all processes."""
    found: dict[str, list[Curve]] = {}
    for own in sorted(name for name in results if name.startswith(f"{part}-")):
        for name, session in results[own].items():
            for run in session["runs"]:
                found.setdefault(name or run["by"], []).append(run["curve"])
    return found


def first(curve: Curve, accuracy: float) -> float:
    return next((r["labels"] for r in curve if r["accuracy"] >= accuracy), float("inf"))


def wrong_at(curve: Curve, labels: int) -> float:
    """% wrong; a run that has reached its aim stays where it was."""
    return 100 * (1 - [r for r in curve if r["labels"] <= labels][-1]["accuracy"])


def table(part: str, found: dict[str, list[Curve]]) -> str:
    """Labels to 90 % and 95 %, the median over seeds and each; inf where a run never got there."""
    lines = ["| chosen by | to 10 % | to 5 % | published | at the end: labels, % wrong |"]
    lines += ["|---|---|---|---|---|"]
    for name, own in found.items():
        reach = [[first(curve, a) for curve in own] for a in (0.90, 0.95)]
        words = [f"{np.median(r):g} ({', '.join(f'{v:g}' for v in r)})" for r in reach]
        known = PUBLISHED.get(name) if part == "gal" else None
        most = max(curve[-1]["labels"] for curve in own)
        end = np.array([wrong_at(curve, most) for curve in own])
        spread = end.std(ddof=1) if len(end) > 1 else 0.0
        theirs = "/".join(map(str, known or ()))
        last = f"{most}, {end.mean():.1f} ± {spread:.1f}"
        lines.append(f"| {name} | {words[0]} | {words[1]} | {theirs} | {last} |")
    return "\n".join(lines)


def figure(results: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no figure")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    there = {part: found for part in PARTS if (found := curves(results, part))}
    if not there:
        return
    drawn, axes = plt.subplots(1, len(there), figsize=(5 * len(there), 4), squeeze=False)
    for axis, (part, found) in zip(axes[0], there.items(), strict=True):
        for name, own in found.items():
            labels = sorted({r["labels"] for curve in own for r in curve})
            mean = [np.mean([wrong_at(curve, k) for curve in own]) for k in labels]
            axis.plot(labels, mean, label=name)
        axis.set(yscale="log", xlabel="labels", ylabel="% of test images wrong", title=PARTS[part])
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.tick_params(axis="y", which="both", labelsize=8)
        axis.legend(fontsize=8)
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)


def draw(out: Path) -> None:
    """The table and the figure, of all that is known."""
    results = collected(out)
    report = [f"## {p}\n\n{table(p, found)}\n" for p in PARTS if (found := curves(results, p))]
    out.with_name(f"{out.name}.md").write_text("\n".join(report))
    print("\n".join(report), flush=True)
    figure(results, out.with_name(f"{out.name}.png"))


def everything(args: argparse.Namespace) -> None:
    """Settled first; then parts × shares of the seeds, each a process; then tables and figures."""
    began, seeds = time.time(), list(range(args.seeds[0]))
    args.out.mkdir(parents=True, exist_ok=True)
    settled, parts = args.out / "settings.json", args.parts.split(",")
    if not settled.exists():
        if "settle" in parts:
            settle(args, began + 60 * args.minutes * args.share)
        else:
            short = {"steps": 5, "batch": 8} if args.tiny else {}
            settled.write_text(json.dumps(SETTLED | short))
    left = args.minutes - (time.time() - began) / 60 - (0 if args.tiny else 0.5)
    running = []
    for part in parts:
        for i in range(args.processes if part != "settle" else 0):
            own = [str(seed) for seed in seeds[i :: args.processes]]
            command = [sys.executable, __file__, *sys.argv[1:], "--only", part, "--index", str(i)]
            running.append(
                subprocess.Popen([*command, "--seeds", *own, "--minutes", f"{left:.2f}"])
            )
    for process in running:
        process.wait()
    draw(args.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("DOXA_DATA", "shared/data"))
    )
    parser.add_argument("--out", type=Path, default=Path("active_mnist"))
    parser.add_argument("--parts", default="settle,gal")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--draw", action="store_true", help="of what --out holds, without a fit")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--share", type=float, default=0.25, help="of the time, for settling")
    parser.add_argument("--seeds", type=int, nargs="+", default=[5], help="how many")
    parser.add_argument("--processes", type=int, default=2, help="for each part")
    parser.add_argument("--labels", type=int, default=400)
    parser.add_argument("--sample", type=int, default=2000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--budgets", type=int, nargs="+", default=[500, 2500])
    parser.add_argument("--tiny", action="store_true", help="a try: few of everything")
    args = parser.parse_args()
    if args.tiny:
        args.labels, args.sample, args.test, args.share, args.processes = 40, 120, 100, 0.0, 1
        args.budgets = [10]
    torch.set_float32_matmul_precision("high")
    if args.draw:
        draw(args.out)
    elif args.only:
        {"gal": gal, "repeated": repeated, "equal": equal}[args.only](args)
    else:
        everything(args)


if __name__ == "__main__":
    main()
