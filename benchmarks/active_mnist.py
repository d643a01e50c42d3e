"""Active learning on MNIST, in the protocol of Gal, Islam & Ghahramani (2017), on a GPU.

    python benchmarks/active_mnist.py --device cuda --minutes 8 --parts settle,gal --out mnist
    python benchmarks/active_mnist.py --tiny --out tiny                 # a try on the CPU

Two convolutions of 32 filters of 4 × 4, dropout of 0.25 and 0.5, 20 balanced labels at first, 10
more a round, 100 masks, the 10,000 test images. How the network is trained is settled on training
images that no campaign asks about, before a test image is seen; the same in every round of every
campaign, from fresh weights. A round scores a random part of the pool (--sample). Parts:

    settle    a grid over initial weights, prior, rate, steps and the scale of pixels; without it,
              what was settled before
    gal       labels to 10 % and 5 % error for six acquisitions
    repeated  a pool that holds every image three times, with noise (Kirsch et al. 2019): BALD asks
              the same thing again and again, BatchBALD does not
    equal     BALD with MC dropout, snapshot and deep ensembles, each with the same number of
              gradients a round, for each of --budgets

Seeds are dealt to --processes for each part. Every round writes PART-i.json (curves, chosen rows)
and the campaign's folder: the same command goes on where the time was up.
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

import torch
from active_mnist_net import SETTLED, images, net, options, settle
from active_mnist_tables import PARTS, draw
from torch import Tensor

import doxa
from doxa.decide.active import Learned, learn

WAYS = ("variation_ratio_of_mean", "bald", "max_entropy", "mean_std", "random", "batch_bald")
MEMBERS = 5


def balanced(y: Tensor, seeds: list[int], each: int = 2) -> list[list[int]]:
    """So many rows of every class, for each seed."""
    starts = []
    for seed in seeds:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        starts.append([int(r) for c in range(10) for r in order[y[order] == c][:each]])
    return starts


class Campaign:
    """What the campaigns of a part share, and what is done after each round: a line, a file, and
    the end of the time."""

    def __init__(self, part: str, asked: argparse.Namespace) -> None:
        self.part, self.asked, self.began = part, asked, time.time()
        self.until = self.began + 60 * asked.minutes
        self.file = asked.out / f"{part}-{asked.index}.json"
        self.found = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.settings = json.loads((asked.out / "settings.json").read_text())
        found = images(asked.data, asked.device, self.settings["scale"])
        (self.x, self.y), test = found["pool"], found["test"]
        self.test = (test[0][: asked.test], test[1][: asked.test])

    def learn(self, x: Tensor, y: Tensor, method: Any, name: str = "", **own: Any) -> None:
        def after(found: Learned) -> bool:
            rounds = [one.curve[-1] for one in found.learners if one.curve]
            asking = all(one.book.asked or one.book.stopped for one in found.learners)
            if rounds and asking:
                accuracy: dict[str, list[float]] = {}
                for one in found.learners:
                    accuracy.setdefault(one.by, []).append(one.curve[-1]["accuracy"])
                said = " ".join(f"{by} {sum(v) / len(v):.3f}" for by, v in accuracy.items())
                labels = max(r["labels"] for r in rounds)
                left = sum(not one.book.stopped for one in found.learners)
                print(f"[{self.part}-{self.asked.index} {name} {time.time() - self.began:.0f} s] "
                      f"{labels} labels, {left} runs: {said}", flush=True)  # fmt: skip
                self.found[name] = found.to_json()
                aside = self.file.with_suffix(".part")
                aside.write_text(json.dumps(self.found))
                aside.replace(self.file)
            return time.time() > self.until

        seeds = self.asked.seeds
        learn(
            net(self.settings).to(self.asked.device), x, y, method, seeds=seeds,
            start=balanced(y, seeds), step=10, test=self.test, callback=after, metric="accuracy",
            n=10 if self.asked.tiny else 100,
            folder=self.asked.out / f"{self.file.stem}{name.replace(' ', '-')}",
            **{"steps": self.settings["steps"], **own},
            **options(self.settings, self.asked.device),
        )  # fmt: skip


def gal(asked: argparse.Namespace) -> None:
    campaign = Campaign("gal", asked)
    campaign.learn(
        campaign.x, campaign.y, "mc-dropout", by=list(WAYS), target=0.951, budget=asked.labels,
        sample=asked.sample,
    )  # fmt: skip


def repeated(asked: argparse.Namespace) -> None:
    """Each of some images three times, with noise of standard deviation 0.1 (pixels in 0 … 1)."""
    campaign = Campaign("repeated", asked)
    source = torch.Generator().manual_seed(0)
    some = torch.randperm(len(campaign.x), generator=source)[: asked.sample // 2]
    copies = some.repeat(3)
    size = 0.1 / (0.3081 if campaign.settings["scale"] == "standard" else 1.0)
    noise = size * torch.randn(len(copies), 1, 28, 28, generator=source)
    x = campaign.x[copies.to(campaign.x.device)] + noise.to(campaign.x.device)
    campaign.learn(
        x, campaign.y[copies], "mc-dropout", by=["batch_bald", "bald", "random"],
        budget=min(asked.labels, 320),
    )  # fmt: skip


def equal(asked: argparse.Namespace) -> None:
    """The same number of gradients a round: five cycles of equal shares of one run, the same
    shares for members of their own, or all of it for one dropout network."""
    campaign = Campaign("equal", asked)
    end, left = campaign.until, 3 * len(asked.budgets)
    for steps in asked.budgets:
        methods: dict[str, tuple[Any, dict[str, Any]]] = {
            "MC dropout": (doxa.MCDropout(), {"steps": steps}),
            "snapshots": (doxa.SnapshotEnsemble(size=MEMBERS), {"steps": steps}),
            "deep ensemble": (
                doxa.DeepEnsemble(), {"steps": steps // MEMBERS, "members": MEMBERS},
            ),
        }  # fmt: skip
        for name, (method, own) in methods.items():
            campaign.until = time.time() + (end - time.time()) / left  # equal parts
            left -= 1
            campaign.learn(
                campaign.x, campaign.y, method, f"{name} {steps}", by=["bald"], target=0.951,
                budget=min(asked.labels, 300), sample=asked.sample, **own,
            )  # fmt: skip


def everything(asked: argparse.Namespace) -> None:
    """Settled first; then parts × shares of the seeds, each a process; then tables and figures."""
    began, seeds = time.time(), list(range(asked.seeds[0]))
    asked.out.mkdir(parents=True, exist_ok=True)
    settled, parts = asked.out / "settings.json", asked.parts.split(",")
    if not settled.exists():
        if "settle" in parts:
            settle(asked, began + 60 * asked.minutes * asked.share)
        else:
            short = {"steps": 5, "batch": 8} if asked.tiny else {}
            settled.write_text(json.dumps(SETTLED | short))
    left = asked.minutes - (time.time() - began) / 60 - (0 if asked.tiny else 0.5)
    running = []
    for part in parts:
        for i in range(asked.processes if part != "settle" else 0):
            own = [str(seed) for seed in seeds[i :: asked.processes]]
            command = [sys.executable, __file__, *sys.argv[1:], "--only", part, "--index", str(i)]
            running.append(
                subprocess.Popen([*command, "--seeds", *own, "--minutes", f"{left:.2f}"])
            )
    for process in running:
        process.wait()
    draw(asked.out)


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--data", type=Path, default=Path(os.environ.get("DOXA_DATA", "shared/data")))
    ask.add_argument("--out", type=Path, default=Path("active_mnist"))
    ask.add_argument("--parts", default="settle,gal")
    ask.add_argument("--only", choices=PARTS)
    ask.add_argument("--index", type=int, default=0)
    ask.add_argument("--draw", action="store_true", help="of what --out holds, without a fit")
    ask.add_argument("--minutes", type=float, default=9.0)
    ask.add_argument("--share", type=float, default=0.25, help="of the time, for settling")
    ask.add_argument("--seeds", type=int, nargs="+", default=[5], help="how many")
    ask.add_argument("--processes", type=int, default=2, help="for each part")
    ask.add_argument("--labels", type=int, default=400)
    ask.add_argument("--sample", type=int, default=2000)
    ask.add_argument("--test", type=int, default=10_000)
    ask.add_argument("--budgets", type=int, nargs="+", default=[500, 2500])
    ask.add_argument("--tiny", action="store_true", help="a try: few of everything")
    asked = ask.parse_args()
    if asked.tiny:
        asked.labels, asked.sample, asked.test, asked.share, asked.processes = 40, 120, 100, 0.0, 1
        asked.budgets = [10]
    torch.set_float32_matmul_precision("high")
    if asked.draw:
        draw(asked.out)
    elif asked.only:
        {"gal": gal, "repeated": repeated, "equal": equal}[asked.only](asked)
    else:
        everything(asked)


if __name__ == "__main__":
    main()
