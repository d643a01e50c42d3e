"""Deep adaptive design on location finding: K = 2 sources in the plane, T = 30 measurements.

    python -m benchmarks.location_finding --device cuda --minutes 8 --out results/
    python -m benchmarks.location_finding --out benchmarks/results --draw figure.png

Random, fixed and adaptive designs by the total information of a run, between sPCE and sNMC with
500,000 contrasts, as in Foster et al. (2021), whose lower bounds are random 8.30, fixed 8.84 and
DAD 10.93. The network and the rate are about the paper's; gradients are clipped: a
run without that, of a deeper network, was lost. Where the training bound falls by half a nat, the
weights of its best are put back. The number of updates is what the minutes allow, and is written
beside the result in OUT/location_finding.json. --draw makes a figure of such a file, without a run.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from doxa.decide.design import Adaptive, Fixed, Policy, Random, information, location_finding
from doxa.decide.design.adaptive import rollout, train_policy
from doxa.decide.design.draws import source, uniform

INK = "#22303c"
PUBLISHED = {"random": 8.303, "fixed": 8.838, "variational": 8.776, "dad": 10.926}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda")
    add("--minutes", type=float, default=8.0)
    add("--out", type=Path, default=Path("location_finding"))
    add("--steps", type=int, default=30, help="measurements in a run, T")
    add("--sources", type=int, default=2)
    add("--outer", type=int, default=1024)
    add("--inner", type=int, default=4095)
    add("--updates", type=int, default=60_000, help="at most")
    add("--hidden", type=int, default=256)
    add("--encoding", type=int, default=16)
    add("--rate", type=float, default=1e-4)
    add("--clip", type=float, default=1.0)
    add("--only", nargs="*", default=["random", "fixed", "dad"])
    add("--rollouts", type=int, default=2048)
    add("--contrasts", type=int, default=500_000)
    add("--seed", type=int, default=0)
    add("--draw", type=Path, help="a figure of what --out holds; nothing is run")
    add("--eager", action="store_true", help="without torch.compile")
    return parser.parse_args()


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.time()
        self.experiment = location_finding(args.sources, device=args.device)
        self.found: dict[str, Any] = {"settings": {**vars(args), "out": str(args.out)}}
        self.found |= {"published": PUBLISHED, "torch": torch.__version__}

    def say(self, message: str) -> None:
        print(f"[{(time.time() - self.began) / 60:5.2f} min] {message}", flush=True)

    def policy(self, seed: int) -> Adaptive:
        args = self.args
        return Adaptive(
            self.experiment.space, hidden=(args.hidden,), encoding=args.encoding, seed=seed
        ).to(args.device)  # fmt: skip

    def train(self, name: str, policy: Policy, rate: float, seconds: float) -> dict[str, Any]:
        """As many updates as the seconds allow, by what fifty of them take."""
        args = self.args
        common = {
            "outer": args.outer, "inner": args.inner, "seed": args.seed,
            "compiled": not args.eager, "rate": rate, "clip": args.clip,
        }  # fmt: skip
        started = time.time()
        try:
            each = self.seconds_each(policy, common)
        except RuntimeError as error:  # a compiler that does not work here
            if args.eager:
                raise
            self.say(f"without torch.compile: {str(error).splitlines()[0]}")
            args.eager, common["compiled"] = True, False
            each = self.seconds_each(policy, common)
        left = seconds - (time.time() - started) * 2  # it is recorded once more
        updates = max(20, min(args.updates, int(left / each)))
        self.say(f"{name}: {1e3 * each:.2f} ms an update, {updates} updates at rate {rate:g}")
        guard = Guard(policy)

        def report(t: int, value: float) -> None:
            guard.see(t, value)
            if len(guard.curve) % 25 == 0:
                self.say(f"  {name} {t}: sPCE {value:.3f}, best {guard.best:.3f}")

        done = train_policy(
            self.experiment, policy, args.steps, updates=updates, every=max(1, updates // 400),
            report=report, **common,
        )  # fmt: skip
        guard.end()
        curve = guard.curve
        return {
            "updates": done.updates, "rate": rate, "ms_an_update": 1e3 * each, "curve": curve,
            "seconds": time.time() - started, "captured": done.captured, "put_back": guard.put_back,
        }  # fmt: skip

    def seconds_each(self, policy: Policy, common: dict[str, Any]) -> float:
        kept = {name: value.clone() for name, value in policy.state_dict().items()}
        ticks: list[float] = []
        count = 10 if self.args.device == "cpu" else 60
        train_policy(
            self.experiment, policy, self.args.steps, updates=count, every=count // 2,
            report=lambda t, value: ticks.append(time.time()), **common,
        )  # fmt: skip
        policy.load_state_dict(kept)
        return (ticks[-1] - ticks[0]) / (count - count // 2)

    def evaluate(self, name: str, policy: Policy) -> None:
        args = self.args
        bounds = information(
            self.experiment, policy, args.steps, rollouts=args.rollouts, inner=args.contrasts,
            groups=32, seed=args.seed + 1,
        )  # fmt: skip
        self.found.setdefault("bounds", {})[name] = asdict(bounds)
        self.say(f"{name}: {bounds}; published {PUBLISHED[name]}")
        generator = source(args.device, "picture", args.seed)
        like = next(iter([*policy.parameters(), *policy.buffers()]))
        theta = self.experiment.prior.draw(4, generator, like)
        noise = uniform((args.steps, 4), like, generator)
        with torch.no_grad():
            seen = rollout(self.experiment, policy, theta, noise)
        runs = {"theta": theta, "designs": seen.designs, "outcomes": seen.outcomes}
        plain = {key: value.cpu().tolist() for key, value in runs.items()}
        self.found.setdefault("runs", {})[name] = plain
        self.write()

    def write(self) -> None:
        self.found["minutes"] = (time.time() - self.began) / 60
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / "location_finding.json").write_text(json.dumps(self.found))


class Guard:
    """Remembers the weights of the best training bound, as a mean of five, and puts them back."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.curve, self.put_back = policy, list[tuple[int, float]](), list[int]()
        self.best, self.kept, self.fresh = float("-inf"), self.weights(), 0

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.policy.state_dict().items()}

    def see(self, t: int, value: float) -> None:
        self.curve.append((t, value))
        self.fresh += 1
        if self.fresh < 5:
            return
        now = sum(v for _, v in self.curve[-5:]) / 5
        if now > self.best:
            self.best, self.kept = now, self.weights()
        elif now < self.best - 0.5:
            self.policy.load_state_dict(self.kept)  # in place: a captured update sees it
            self.put_back.append(t)
            self.fresh = 0

    def end(self) -> None:
        last = [v for _, v in self.curve[-5:]]
        if sum(last) / len(last) < self.best - 0.05:
            self.policy.load_state_dict(self.kept)


def draw(found: dict[str, Any], path: Path) -> None:
    """Where random, fixed and adaptive designs measure in one run, and the information of each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in ("random", "fixed", "dad") if name in found["runs"]]
    figure = Figure(figsize=(4.6 * len(names), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for ax, name in zip(figure.subplots(1, len(names)), names, strict=True):
        runs, bound = found["runs"][name], found["bounds"][name]
        x, y = ([step[0][i] for step in runs["designs"]] for i in (0, 1))
        ax.plot(x, y, "-", color="#9aa5ad", lw=0.6)
        dots = ax.scatter(x, y, c=range(1, len(x) + 1), cmap="viridis", s=26, zorder=3)
        for place in runs["theta"][0]:
            ax.plot(*place, "*", color="#c8553d", ms=15, mec="white", zorder=4)
        ax.set_title(
            f"{name}: {bound['lower']:.2f} to {bound['upper']:.2f} nats", loc="left", fontsize=11,
            color=INK,
        )  # fmt: skip
        ax.set_xlim(-3, 3)
        ax.set_ylim(-3, 3)
        ax.set_aspect("equal")
        ax.spines[["top", "right"]].set_visible(False)
    figure.colorbar(dots, ax=figure.axes, label="measurement", shrink=0.8)
    figure.savefig(path, dpi=110)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    args = parsed()
    if args.draw:
        draw(json.loads((args.out / "location_finding.json").read_text()), args.draw)
        return
    bench = Bench(args)
    budget = 60 * args.minutes
    space = bench.experiment.space
    bench.found["training"] = {}
    if "random" in args.only:
        bench.evaluate("random", Random(space, args.seed).to(args.device))
    if "fixed" in args.only:
        fixed = Fixed(space, args.steps, seed=args.seed).to(args.device)
        bench.found["training"]["fixed"] = bench.train("fixed", fixed, 1e-2, 0.15 * budget)
        bench.evaluate("fixed", fixed)
    if "dad" in args.only:
        policy = bench.policy(args.seed)
        left = budget - (time.time() - bench.began) - 20
        bench.found["training"]["dad"] = bench.train("dad", policy, args.rate, left)
        bench.evaluate("dad", policy)
    bench.say("done")


if __name__ == "__main__":
    main()
