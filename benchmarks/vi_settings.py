"""Initial settings of variational methods, chosen by held-out training rows, never by test rows.

    python -m benchmarks.vi_settings mnist --data FOLDER --device cuda [--minutes 8] [--out FILE]
    python -m benchmarks.vi_settings cifar --data FOLDER --device cuda
    python -m benchmarks.vi_settings cifar-mean-field --data FOLDER --device cuda
    python -m benchmarks.vi_settings uci --data FOLDER --sets yacht,energy,boston_housing
    python -m benchmarks.vi_settings bounds --data FOLDER

For IVON: the first curvature h₀, the rate, and β₂, as how often its memory fits into the run
(steps · (1−β₂); 0: β₂ = .999 whatever the length). For mean-field on a ResNet-20: the prior, the
first width, whether the prior's scales are learned. `bounds`: whether a better bound predicts
better, with a small network on 6,000 rows of MNIST. The points of a grid are one stacked fit; every
point is a line of FILE (benchmarks/results/vi_settings.jsonl) as soon as it is known.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import doxa
from benchmarks.image_cells import quality
from benchmarks.image_data import Images, Settings, load_images, settings
from benchmarks.image_methods import run
from doxa.app.bench.uci import Problem, load

CURVATURES = (0.01, 0.1, 1.0, 10.0)
RATES = (0.03, 0.1, 0.3, 1.0)
MEMORIES = (4.0, 1.0, 2.0, 0.0, 8.0)
PRIORS = (doxa.Normal(1.0), doxa.Normal(0.1), doxa.FanInNormal(math.sqrt(2)))
RESULTS = Path(__file__).parent / "results" / "vi_settings.jsonl"
Row = dict[str, Any]


def ivon(memories: float, steps: int, **more: Any) -> doxa.IVON:
    return doxa.IVON(beta2=max(0.0, 1 - memories / steps) if memories else 0.999, **more)


def described(spec: Any) -> Row:
    return {name: value if isinstance(value, float) else repr(value)
            for name, value in spec.hyper.items()}  # fmt: skip


def of_images(
    data: Images, s: Settings, held: int, method: Any, grid: Row, epochs: float, samples: int
) -> Iterator[Row]:
    """Error and log-likelihood of the last `held` training rows at every point of the grid."""
    cut = len(data.x) - held
    kept = replace(data, x=data.x[:cut], y=data.y[:cut])
    start = time.perf_counter()
    sweep = run(kept, s, 0, method, length=epochs / s.epochs, runs=doxa.Runs(grid=grid))
    seconds = time.perf_counter() - start
    for posterior, spec in zip(sweep, sweep.specs, strict=True):
        scores = quality(posterior, data.x[cut:], data.y[cut:], samples)
        width = posterior.covariance.diagonal().sqrt()
        yield {
            **described(spec), "epochs": epochs, "error": 1 - scores["accuracy"],
            "log_likelihood": scores["log_likelihood"], "width": float(width.median()),
            "elbo": posterior.elbo, "status": str(posterior.status), "seconds": seconds,
        }  # fmt: skip


def mnist(args: argparse.Namespace) -> Iterator[Row]:
    s = settings("mnist")
    data = load_images(args.data, "mnist", args.rows, 10, args.device, outside=False)
    data = replace(data, x=data.x.flatten(1))
    held = len(data.x) // 6
    steps = int(args.epochs * -(-(len(data.x) - held) // s.batch))
    for memories in MEMORIES:
        grid = {"initial_curvature": CURVATURES, "lr": RATES}
        for row in of_images(data, s, held, ivon(memories, steps), grid, args.epochs, 20):
            yield {"memories": memories, **row}


def cifar(args: argparse.Namespace) -> Iterator[Row]:
    s = settings("cifar")
    data = load_images(args.data, "cifar10", args.rows, 10, args.device, outside=False)
    held = len(data.x) // 5
    steps = int(args.epochs * -(-(len(data.x) - held) // s.batch))
    for prior, memories in itertools.product(PRIORS[::2], (4.0, 1.0)):
        grid = {"prior": (prior,), "initial_curvature": (0.1, 1.0, 10.0), "lr": RATES}
        for row in of_images(data, s, held, ivon(memories, steps), grid, args.epochs, 20):
            yield {"memories": memories, **row}


def cifar_mean_field(args: argparse.Namespace) -> Iterator[Row]:
    s = settings("cifar")
    data = load_images(args.data, "cifar10", args.rows, 10, args.device, outside=False)
    held = len(data.x) // 5
    widths = {"initial_std": (0.001, 0.003, 0.01), "lr": (0.002, 0.005)}
    for longer, (scale, priors) in itertools.product(
        (1, 3), (("given", PRIORS), ("layer", PRIORS[:1]))
    ):
        grid = {"prior": priors, **widths}
        method = doxa.MeanField(prior_scale=scale)
        for row in of_images(data, s, held, method, grid, longer * args.epochs, 20):
            yield {"prior_scale": scale, **row}


def uci(args: argparse.Namespace) -> Iterator[Row]:
    for name, memories in itertools.product(args.sets.split(","), MEMORIES):
        data = load(Path(args.data), name)
        problem = Problem(data.x, data.y, data.train[:2], hidden=50, seed=0)
        kept, held = problem.validation()
        epochs = args.epochs if problem.small else args.epochs / 10
        steps = int(epochs * -(-len(kept[0]) // 32))
        runs = doxa.Runs(rows=kept, grid={"initial_curvature": CURVATURES, "lr": RATES[:3]})
        sweep = problem.fit(
            ivon(memories, steps), likelihood="gaussian", epochs=epochs, batch_size=32,
            schedule="cosine", runs=runs,
        )  # fmt: skip
        for posterior, spec in zip(sweep, sweep.specs, strict=True):
            yield {
                "set": name, "split": spec.split, "memories": memories, **described(spec),
                "log_likelihood": problem.score(posterior, held[spec.split], 200),
                "width": float(posterior.covariance.diagonal().sqrt().median()),
                "elbo": posterior.elbo, "status": str(posterior.status),
            }  # fmt: skip


def bounds(args: argparse.Namespace) -> Iterator[Row]:
    n, held = args.rows or 6000, 2000
    data = load_images(args.data, "mnist", n + held, 10, args.device, outside=False)
    x, y = data.x.flatten(1), data.y
    methods = {
        "weights": doxa.MeanField(initial_std=0.01),
        "local": doxa.MeanField(initial_std=0.01, estimator="local"),
        "mnf": doxa.MNF(initial_std=0.01),
        "mnf, no flow": doxa.MNF(initial_std=0.01, flow_length=0),
    }
    for name, method in methods.items():
        net = doxa.nets.mlp(784, 10, hidden=(100, 100))
        posterior = doxa.fit(
            doxa.Model(net, "categorical", doxa.Normal(1.0)), (x[:n], y[:n]), method,
            steps=int(args.epochs), batch_size=128, lr=3e-3, schedule="cosine", validation=None,
            device=args.device, progress=False,
        )  # fmt: skip
        scores = quality(posterior, x[n:], y[n:], 20)
        yield {"method": name, "error": 1 - scores["accuracy"],
               "log_likelihood": scores["log_likelihood"], "bound": posterior.elbo / n}  # fmt: skip


PARTS = {"mnist": (mnist, 20), "cifar": (cifar, 30), "cifar-mean-field": (cifar_mean_field, 30),
         "uci": (uci, 400), "bounds": (bounds, 2500)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--data", required=True, help="the folder of data sets")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--epochs", type=float, default=None, help="of `bounds`: steps")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--sets", default="yacht,energy,boston_housing")
    args = parser.parse_args()
    part, epochs = PARTS[args.part]
    args.epochs = args.epochs or epochs
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    with args.out.open("a") as file:
        for row in part(args):
            line = json.dumps({"part": args.part, **row})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
            if time.monotonic() > end:
                break


if __name__ == "__main__":
    main()
