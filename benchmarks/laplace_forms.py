"""Laplace's structures beside the full matrix: how wide they are, and how well they predict.

    python -m benchmarks.laplace_forms

scikit-learn's diabetes (350 rows for training, 92 for testing, five splits), one hidden layer of 50
(601 weights), default settings, the same weights in every row. Results go to
benchmarks/results/laplace_forms.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor

import doxa

SPLITS = 5
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {"newton_steps": 0}),
    ("functional", {"structure": "functional"}),
    ("functional, 200 rows", {"structure": "functional", "kernel_rows": 200}),
    ("functional, 100 rows", {"structure": "functional", "kernel_rows": 100}),
    ("functional, 50 rows", {"structure": "functional", "kernel_rows": 50}),
    ("functional, 25 rows", {"structure": "functional", "kernel_rows": 25}),
    ("subnetwork of 300", {"subnetwork": 300}),
    ("subnetwork of 100", {"subnetwork": 100}),
    ("kronecker", {"structure": "kronecker"}),
    ("low-rank, 50", {"structure": "low-rank"}),
    ("diagonal", {"structure": "diagonal"}),
)  # fmt: skip


def split(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = (torch.as_tensor(a) for a in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order, None]
    return x[:350], y[:350], x[350:], y[350:]


def figures(settings: dict[str, Any], seed: int) -> tuple[Tensor, float, float]:
    """Epistemic standard deviations, mean test log-likelihood, and the prior's scale."""
    x, y, x_test, y_test = split(seed)
    net = doxa.nets.mlp(10, 1, (50,)).double()
    method = doxa.Laplace(**settings)
    posterior = doxa.fit(net, (x, y), method, seed=seed, standardize=True, steps=600)
    p = posterior.predict(x_test)
    scale = posterior.diagnostics["prior_scale"][0]
    return p.epistemic.sqrt(), float(p.log_prob(y_test).mean()), float(scale)


def main() -> None:
    lines = [
        "# Laplace's structures beside the full matrix",
        "",
        "Made by `python -m benchmarks.laplace_forms`: diabetes, 350 rows (a tenth held out), 601 "
        "weights, five splits. Width: epistemic standard deviation over that of the full matrix at "
        "test rows, median and 90 % range. The prior's scale is found by evidence, or by held-out "
        "rows.",
        "",
        "| structure | width | 90 % | test log-likelihood | prior's scale |",
        "|---|---|---|---|---|",
    ]
    full: list[Tensor] = []
    for name, settings in ROWS:
        each = [figures(settings, seed) for seed in range(SPLITS)]
        full = full or [std for std, _, _ in each]
        ratio = torch.cat([std / whole for (std, _, _), whole in zip(each, full, strict=True)])
        low, middle, high = ratio.quantile(torch.tensor([0.05, 0.5, 0.95]).double()).tolist()
        score, scale = (sum(found[i] for found in each) / SPLITS for i in (1, 2))
        lines.append(
            f"| {name} | {middle:.3f} | {low:.2f} … {high:.2f} | {score:.3f} | {scale:.2f} |"
        )
    place = Path(__file__).resolve().parent / "results" / "laplace_forms.md"
    place.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
