"""Every picture of `doxa.plot`, on small examples: `python examples/plots.py` writes them to
docs/figures/plots, for docs/plots.md. About two minutes on one core."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import distributions

import doxa
from doxa.decide.design import Study, working_memory


def wave(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A noisy sine with a gap in the middle."""
    random = np.random.default_rng(seed)
    x = random.uniform(-3.0, 3.0, 3 * rows)
    x = x[np.abs(x) > 0.8][:rows, None]
    y = np.sin(2.0 * x[:, 0]) + 0.15 * random.normal(size=rows)
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)


def moons(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two noisy half circles."""
    random = np.random.default_rng(seed)
    label = random.integers(0, 2, rows)
    angle = random.uniform(0.0, np.pi, rows)
    x = np.stack([np.cos(angle) + label, np.sin(angle) * (1 - 2 * label) + 0.5 * label], 1)
    x += 0.25 * random.normal(size=x.shape)
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(label)


def pictures(quick: bool = False) -> dict[str, Callable[[Any], Any]]:
    """{name: a function that draws it on axes}."""
    steps, draws = (30, 40) if quick else (1500, 500)
    (x, y), (x_test, y_test) = wave(120, 0), wave(400, 1)
    net = doxa.nets.mlp(1, 1, (50, 50))
    few: dict[str, Any] = {"standardize": True, "steps": steps, "progress": False}
    ensemble = doxa.fit(net, (x, y), "deep-ensemble", **few)
    p = ensemble.predict(x_test)
    (a, b), (a_test, b_test) = moons(200, 0), moons(800, 1)
    classes = doxa.nets.mlp(2, 2, (50,))
    labels = doxa.fit(classes, (a, b), "deep-ensemble", likelihood="categorical", **few)
    q = labels.predict(a_test)
    far = 4.0 * torch.as_tensor(np.random.default_rng(2).normal(size=(800, 2)))
    inside, outside = (
        doxa.evaluate.ood_scores(labels, rows, (a, b), ["knn"]) for rows in (a_test, far)
    )

    def eight_schools(v: dict[str, torch.Tensor]) -> torch.Tensor:
        effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
        errors = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
        prior = distributions.Normal(0.0, 5.0).log_prob(v["mu"]) - (v["tau"] / 5.0).square().log1p()
        total = (v["tau"] ** 2 + errors**2).sqrt()
        return prior + distributions.Normal(v["mu"], total).log_prob(effects).sum()

    schools = doxa.sample(
        eight_schools, {"mu": 0.0, "tau": 1.0}, doxa.NUTS(draws=draws, burn_in=draws), members=4,
        constraints={"tau": "positive"}, progress=False,
    )  # fmt: skip
    study = Study(working_memory())
    for length, outcome in ((5, 1), (7, 1), (9, 0)):
        study.tell(length, outcome)
    reference = doxa.fit(None, (x, y), "gp", standardize=True, progress=False).predict(x_test)
    others = {name: doxa.fit(net, (x, y), name, **few) for name in ("map", "laplace", "mc-dropout")}
    found = {
        name: one.predict(x_test) for name, one in (others | {"deep-ensemble": ensemble}).items()
    }
    away = {name: doxa.evaluate.closeness(one, reference) for name, one in found.items()}
    line = np.linspace(-3.6, 3.6, 200)
    plot = doxa.plot
    return {
        "reliability": lambda ax: plot.reliability(q, b_test, ax=ax),
        "reliability-numbers": lambda ax: plot.reliability(p, y_test, ax=ax),
        "pit": lambda ax: plot.pit(p, y_test, ax=ax),
        "intervals": lambda ax: plot.intervals(p, y_test, ax=ax),
        "functions": lambda ax: plot.functions(ensemble, line, data=(x, y), ax=ax),
        "decomposition": lambda ax: plot.decomposition(ensemble.predict(line[:, None]), ax=ax),
        "ood": lambda ax: plot.ood(inside, outside, ax=ax),
        "trace": lambda ax: plot.trace(schools, ax=ax),
        "rank": lambda ax: plot.rank(schools, ax=ax),
        "energy": lambda ax: plot.energy(schools, ax=ax),
        "pairs": lambda ax: plot.pairs(schools, ax=ax),
        "learning_curve": lambda ax: plot.learning_curve(ensemble, ax=ax),
        "eig": lambda ax: plot.eig(study, ax=ax),
        "weights": lambda ax: plot.weights(others["laplace"], ax=ax),
        "closeness": lambda ax: plot.closeness(away, ax=ax),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/plots"))
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, draw in pictures(asked.quick).items():
        figure = Figure(figsize=(6.0, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots())
        figure.savefig(asked.out / f"{name}.png", dpi=80, facecolor="white")


if __name__ == "__main__":
    main()
