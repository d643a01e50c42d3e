"""Curves that the default settings of every method must learn, or say that they did not.

    python -m benchmarks.curves [--methods mc-dropout,map] [--curves waves,step] [--seeds 4]
        [--label before] [--table]

Each curve has a formula, rows drawn at random and Gaussian noise. Every setting is a default:
`doxa.nets.mlp` of 50 hidden units, `standardize=True`. The error is the root mean square of the
difference between the predicted mean and the true curve on a dense grid, as a share of the curve's
standard deviation there: 1 is a constant. A method is as good as it says if the error is at most
0.25, or its status is not "ok"; for deep ensembles, Laplace and SWAG it must be at most 0.15.

`--label` names the version of the library that was imported: with the source folder of an earlier
version in PYTHONPATH and `--label before`, its cells are added. `--table` writes the page from all
cells that are there, with times as a ratio to "before". Cells in the file are not fitted again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import doxa
from doxa.app.bench import Store

RESULTS = Path(__file__).parent / "results"
METHODS = (
    "deep-ensemble", "laplace", "swag", "map", "mc-dropout", "concrete-dropout", "mean-field",
    "ivon", "last-layer-vi", "snapshot", "bootstrap", "svgd", "low-rank-vi", "rank1",
    "batch-ensemble", "mnf",
)  # fmt: skip
STRICT = ("deep-ensemble", "laplace", "swag")
LEARNED, STRICTLY = 0.25, 0.15
NOW, BEFORE = "now", "before"


class Curve(NamedTuple):
    """A function of rows [N, D], the intervals of its inputs (each row is in one of them), the
    number of rows and the standard deviation of the noise."""

    function: Callable[[Tensor], Tensor]
    within: tuple[tuple[float, float], ...]
    rows: int
    noise: float
    columns: int = 1
    activation: str = "relu"
    standardize: bool = True

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(seed)
        u = torch.rand(self.rows, self.columns, generator=own)
        interval = torch.randint(len(self.within), (self.rows, 1), generator=own)
        low, high = torch.tensor(self.within)[interval].unbind(-1)
        x = low + (high - low) * u
        return x, self.function(x) + self.noise * torch.randn(self.rows, generator=own)

    def grid(self) -> tuple[Tensor, Tensor]:
        """A dense grid of inputs, and the curve there."""
        count = 1000 if self.columns == 1 else 40
        parts = []
        for low, high in self.within:
            line = torch.linspace(low, high, count)
            parts.append(torch.cartesian_prod(*[line] * self.columns).reshape(-1, self.columns))
        x = torch.cat(parts)
        return x, self.function(x)


def of_x(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x[:, 0])


CURVES = {
    "sin 2x": Curve(of_x(lambda x: torch.sin(2 * x)), ((-3, 3),), 200, 0.1),
    "sin 4πx": Curve(of_x(lambda x: torch.sin(4 * math.pi * x)), ((0, 1),), 200, 0.1),
    "x³/20": Curve(of_x(lambda x: x**3 / 20), ((-4, 4),), 100, 0.2),
    "x sin x": Curve(of_x(lambda x: x * torch.sin(x)), ((-5, 5),), 500, 0.3),
    "step": Curve(of_x(lambda x: (x > 0).float()), ((-2, 2),), 300, 0.05),
    "sin 2x, long": Curve(of_x(lambda x: torch.sin(2 * x)), ((0, 10),), 1000, 0.1),
    "sin 3x, gap": Curve(of_x(lambda x: torch.sin(3 * x)), ((-2, -1), (1, 2)), 120, 0.1),
    "2-D": Curve(
        lambda x: torch.sin(2 * x[:, 0]) * torch.cos(2 * x[:, 1]), ((-2, 2),), 400, 0.1, columns=2
    ),
    "cos 3x": Curve(of_x(lambda x: torch.cos(3 * x)), ((-3, 3),), 250, 0.1),
    "sin 3x, tanh": Curve(
        of_x(lambda x: torch.sin(3 * x)), ((-3, 3),), 200, 0.1,
        activation="tanh", standardize=False,
    ),
}  # fmt: skip


def cell(name: str, method: str, seed: int) -> dict[str, Any]:
    """One fit with every default."""
    curve = CURVES[name]
    x, y = curve.data(seed)
    net = doxa.nets.mlp(curve.columns, 1, activation=curve.activation)
    wall, start = time.perf_counter(), time.process_time()
    posterior = doxa.fit(
        net, (x, y.unsqueeze(1)), method, standardize=curve.standardize, seed=seed, progress=False
    )
    seconds, wall = time.process_time() - start, time.perf_counter() - wall
    grid, truth = curve.grid()
    mean = torch.as_tensor(posterior.predict(grid).mean).flatten().double()
    error = float((mean - truth.double()).square().mean().sqrt() / truth.double().std())
    return {
        "error": error, "status": str(posterior.status), "reason": posterior.status.reason,
        "steps": posterior.diagnostics.get("steps"), "seconds": seconds, "wall": wall,
        "kept_step": posterior.diagnostics.get("stopping", {}).get("kept_step"),
        "alternatives": posterior.diagnostics.get("alternatives"),
        "validation": posterior.validation,
    }  # fmt: skip


def table(cells: dict[tuple[str, ...], dict[str, Any]]) -> str:
    """The largest error over seeds of each method and curve, the fits whose "ok" is wrong, and the
    median time as a ratio."""
    names = list(CURVES)
    lines = [
        f'| method | {" | ".join(names)} | "ok" and above the limit | time, median ratio |',
        "|" + "---|" * (len(names) + 3),
    ]
    for method in METHODS:
        own = {k: v for k, v in cells.items() if k[0] == NOW and k[2] == method}
        if not own:
            continue
        limit = STRICTLY if method in STRICT else LEARNED
        row, wrong = [], 0
        for name in names:
            each = [v for k, v in own.items() if k[1] == name]
            if not each:
                row.append("")
                continue
            worst = max(v["error"] for v in each)
            flagged = sum(v["status"] != "ok" for v in each)
            wrong += sum(v["error"] > limit and v["status"] == "ok" for v in each)
            row.append(f"{worst:.2f}" + (f" ({flagged} not ok)" if flagged else ""))
        ratios = [
            v["seconds"] / cells[(BEFORE, *k[1:])]["seconds"]
            for k, v in own.items() if (BEFORE, *k[1:]) in cells
        ]  # fmt: skip
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        lines.append(f"| {method} | {' | '.join(row)} | {wrong} of {len(own)} | {ratio} |")
    return "\n".join(lines)


HEAD = """# Curves, every default

`python -m benchmarks.curves`: the error of the predicted mean as a share of the curve's standard
deviation, the largest over seeds; in brackets, how many of the fits have a status other than "ok".
The limit is 0.25, and 0.15 for deep ensembles, Laplace and SWAG. Not all cells are there: most
have one seed. Times are processor seconds as a ratio to the version before, on a busy machine and
not interleaved: a rough upper estimate, with the yardsticks, for curves that need a second fit.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--curves", default="; ".join(CURVES), help="separated by semicolons")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--label", default=NOW)
    parser.add_argument("--out", type=Path, default=RESULTS / "curves.jsonl")
    parser.add_argument("--table", action="store_true", help="only write the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(args.out)
    if not args.table:
        wanted = [name.strip() for name in args.curves.split(";")]
        for seed in range(args.seeds):
            for method in args.methods.split(","):
                for name in wanted:
                    key = {"label": args.label, "curve": name, "method": method, "seed": seed}
                    known = store.get(key) is not None
                    found = store.cell(key, partial(cell, name, method, seed))
                    if not known:
                        line = f"{method}, {name}, {seed}: {found['error']:.3f} {found['status']}"
                        print(f"{line}, {found['steps']} steps, {found['seconds']:.1f} s")
        return
    cells = {
        tuple(str(one["key"][k]) for k in ("label", "curve", "method", "seed")): one["result"]
        for one in store.cells()
    }
    page = HEAD + table(cells) + "\n"
    args.out.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
