"""The variance of a mean-field gradient by its draws: ten of the weights, ten nested ones, others.

    python -m benchmarks.draw_variance --data FOLDER [--steps 300,2500,10000] [--batch 128,16]
    python -m benchmarks.draw_variance --task regression [--temperature 0.05]

784-400-400-10 on 12,000 images of MNIST under N(0, 0.1²), or 40-64-64-1 on 2,000 simulated rows
that it learns by heart, fitted for so many steps of one draw of the weights. There, on the first
rows as one batch, each estimator's gradients of the ELBO are taken `--repeats` times: what differs
between them is the noise of the draws alone. The table has their variance summed over weights, by μ
and by ρ, beside that of ten draws of the weights, and the mean of the bound with its standard
error, which all should share.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import doxa
from benchmarks.before_after import network
from benchmarks.image_data import load_images
from doxa.method import Stage

ROWS = {
    "weights, ten draws": {"estimator": "weights", "samples": 10},
    "auto, ten draws": {"estimator": "auto", "samples": 10},
    "local, ten draws": {"estimator": "local", "samples": 10},
    "local, two draws": {"estimator": "local", "samples": 2},
}


class Moments:
    """Of values and of gradients, as they come: a gradient is as large as the network."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def add(self, value: Tensor, grads: dict[str, Tensor]) -> None:
        self.values.append(float(value))
        for name, grad in grads.items():
            own = grad.double()
            self.sums[name] = self.sums.get(name, 0) + own
            self.squares[name] = self.squares.get(name, 0) + own.square()

    def variance(self, name: str) -> float:
        n = len(self.values)
        return float((self.squares[name] - self.sums[name].square() / n).sum() / (n - 1))


@dataclass(frozen=True)
class Estimates(doxa.MeanField):
    """The ELBO and its gradients at one q, many of them."""

    name: ClassVar[str] = "mean-field-estimates"
    rho: ClassVar[Tensor]
    found: ClassVar[Moments]
    repeats: ClassVar[int]

    def init_shape(self, run: Any) -> Any:
        return {"rho": self.rho.clone()}

    def stages(self, run: Any) -> Any:
        objective = self.objective(run)

        def step(run: Any, state: Any, batch: Any, clock: Any) -> Any:
            value, grads, _ = run.value_and_grad(objective, state, batch, clock, ("mean", "rho"))
            self.found.add(value, grads)
            return state, {}

        yield Stage("estimates", step, self.repeats, "all", over=("mean",), capturable=False)


class Task(NamedTuple):
    net: str
    x: Tensor
    y: Tensor
    model_settings: dict[str, Any]


def mnist(folder: Path) -> Task:
    images = load_images(folder, "mnist", 12_000, 10, outside=False)
    model_settings = {"likelihood": "categorical", "prior": doxa.Normal(0.1)}
    return Task("784-400-400-10", images.x.flatten(1), images.y, model_settings)


def regression() -> Task:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 40, generator=g)
    f = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    model_settings = {"likelihood": doxa.Gaussian(0.3), "prior": doxa.FanInNormal(1.0)}
    return Task("40-64-64-1", x, f + 0.3 * torch.randn(2000, 1, generator=g), model_settings)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["mnist", "regression"], default="mnist")
    parser.add_argument("--data", type=Path, default=Path("shared/data"))
    parser.add_argument("--steps", default="300,2500,10000")
    parser.add_argument("--batch", default="128,16")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path, default=None, help="the same table, as JSON lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    net, x, y, model_settings = mnist(args.data) if args.task == "mnist" else regression()
    common = {**model_settings, "validation": None, "progress": False}
    method = doxa.MeanField(temperature=args.temperature)
    Estimates.repeats = args.repeats
    print(f"{'steps':>6} {'rows':>5} {'':20} {'by μ':>7} {'by ρ':>7} {'the bound':>20}")
    for steps in map(int, args.steps.split(",")):
        q = doxa.fit(network(net), (x, y), method, steps=steps, batch_size=128, lr=3e-3, **common)
        Estimates.rho = 0.5 * q.covariance.diagonal().log()
        for size in map(int, args.batch.split(",")):
            base: list[float] = []
            for name, settings in ROWS.items():
                Estimates.found = Moments()
                doxa.fit(
                    network(net), (x[:size], y[:size]), Estimates(**settings), init=q,
                    engine="loop", **common,
                )  # fmt: skip
                own = [Estimates.found.variance(part) for part in ("mean", "rho")]
                base = base or own
                by_mean, by_rho = (a / b for a, b in zip(own, base, strict=True))
                values = torch.tensor(Estimates.found.values, dtype=torch.float64)
                bound, error = float(values.mean()), float(values.std()) / args.repeats**0.5
                row = {
                    "task": args.task, "temperature": args.temperature, "steps": steps,
                    "rows": size, "row": name, "by_mean": by_mean, "by_rho": by_rho,
                    "bound": bound, "error": error,
                }  # fmt: skip
                print(
                    f"{steps:6} {size:5} {name:20} {by_mean:7.3f} {by_rho:7.4f} "
                    f"{bound:12.1f} ± {error:5.1f}", flush=True,
                )  # fmt: skip
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
