"""Selection of the order of a polynomial by evidence, and the average over orders.

    python examples/model_selection.py [figure.png]

The data come from a parabola. Orders 0 … 6 are fitted in one stacked run, their evidences give
p(M_i | D), and the model-averaged prediction is drawn beside that of the most probable order.
"""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import doxa
from doxa.exact import model_average, posterior_over_models

ORDERS = list(range(7))


def main(path: str = "model_selection.png") -> None:
    g = torch.Generator().manual_seed(4)
    x = torch.rand(25, 1, generator=g, dtype=torch.float64) * 4 - 2
    y = 1 - x + 0.8 * x**2 + 0.5 * torch.randn(25, 1, generator=g, dtype=torch.float64)
    sweep = doxa.fit(
        None, (x, y), doxa.BayesianLinear("polynomial"), runs=doxa.Runs(grid={"degree": ORDERS})
    )
    probability = posterior_over_models(sweep)
    for order, posterior, p in zip(ORDERS, sweep, probability, strict=True):
        print(f"order {order}: log evidence {posterior.log_evidence:8.3f}   p(M | D) {p:.3f}")

    grid = torch.linspace(-3.5, 3.5, 200, dtype=torch.float64)[:, None]
    average = model_average(sweep).predict(grid)
    low, high = average.interval(0.95)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    left.bar(ORDERS, probability, color="#2a6f97")
    left.set(xlabel="polynomial order", ylabel="p(M | D)", title="posterior over models")
    best = sweep[int(probability.argmax())].predict(grid).mean
    right.fill_between(grid[:, 0], low[:, 0], high[:, 0], color="#a9d6e5", label="95 %")
    right.plot(grid[:, 0], average.mean[:, 0], color="#01497c", label="model average")
    right.plot(grid[:, 0], best[:, 0], "--", color="#e07a5f", label="most probable order")
    right.plot(x[:, 0], y[:, 0], "k.", ms=5)
    right.set(ylim=(-4, 16), title="prediction")
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)
    print(f"figure: {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
