"""Variational posteriors: their width, and the gap between the ELBO and the evidence.

    python examples/variational.py [folder] [width] [dropout] [bound]

width    the width of the posterior in the gap: every variational method on one small network and
         the data of the demo, compared with Hamiltonian Monte Carlo. Two to three minutes.
dropout  the probability p that concrete dropout learns, as a function of the number of rows.
bound    the ELBO and the evidence for richer and richer q, on f(x) = v tanh(w x + b) + c. Its
         evidence is known: given w and b the rest is Gaussian, and w and b are summed on a grid.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

import doxa
from doxa.data.simulated import GAP, GAP_NOISE, gap_function, gap_regression

INK, OURS, TRUE = "#22303c", "#c8553d", "#2a6f97"
GRID = torch.linspace(-4.5, 4.5, 121).unsqueeze(1)
SIZES = (25, 50, 100, 200, 400, 800)
NOISE = 0.3  # of the bound's problem


def small(hidden: int = 10) -> Any:
    return doxa.nets.mlp(1, 1, (hidden,), "tanh")


def every_weight(net: Any) -> tuple[str, ...]:
    return tuple(name for name, _ in net.named_parameters())


def widths(steps: int = 3000, draws: int = 500) -> dict[str, tuple[Tensor, Tensor]]:
    """The mean and the epistemic standard deviation over GRID, by method; HMC's first."""
    x, y = gap_regression(100, seed=21)
    net = small()
    common = {
        "likelihood": doxa.Gaussian(noise=GAP_NOISE), "prior": doxa.Normal(1.5), "seed": 0,
        "validation": None, "progress": False,
    }  # fmt: skip
    methods = {
        "hmc": doxa.HMC(draws=draws, burn_in=draws, leapfrog=60, target_accept=0.95),
        "mean-field": doxa.MeanField(),
        "ivon": doxa.IVON(),
        "low-rank-vi": doxa.LowRankVI(rank=10),
        "flow-vi": doxa.FlowVI(samples=2),
        "last-layer-vi": doxa.LastLayerVI(),
        "mnf": doxa.MNF(),
        "rank1": doxa.Rank1(),
        "mc-dropout": doxa.MCDropout(p=0.05),
        "concrete-dropout": doxa.ConcreteDropout(),
    }
    found = {}
    for name, method in methods.items():
        own: dict[str, Any] = {"steps": steps} if name != "hmc" else {"members": 4}
        if name == "flow-vi":  # over all weights, not the last layer's alone
            own["subset"] = every_weight(net)
        posterior = doxa.fit(net, (x, y), method, **common, **own)
        if posterior.status != "ok":
            print(f"{name}: {posterior.status}, {posterior.status.reason}")
        p = posterior.predict(GRID)
        found[name] = p.mean, p.epistemic.sqrt()
    return found


def in_gap(std: Tensor) -> float:
    """The mean standard deviation in the gap."""
    inside = (GRID[:, 0] > GAP[0]) & (GRID[:, 0] < GAP[1])
    return float(std[inside].mean())


def dropout_rates(steps: int = 3000, seeds: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor]:
    """The p of each masked layer, [seeds, sizes]; all of them are runs of one fit."""
    x, y = gap_regression(max(SIZES), seed=21)
    order = np.random.default_rng(0).permutation(len(x))
    sweep = doxa.fit(
        doxa.nets.mlp(1, 1, (30, 30), "tanh"), (x, y), doxa.ConcreteDropout(), steps=steps,
        runs=doxa.Runs(rows=[order[:n] for n in SIZES], seeds=seeds), validation=None,
        likelihood=doxa.Gaussian(noise=GAP_NOISE), prior=doxa.Normal(1.5), progress=False,
    )  # fmt: skip
    layers = sweep[0].diagnostics["p"]
    return {
        f"layer {i + 2}": torch.tensor([run.diagnostics["p"][layer][0] for run in sweep])
        .reshape(len(SIZES), len(seeds)).T
        for i, layer in enumerate(layers)
    }  # fmt: skip


def few_rows() -> tuple[Tensor, Tensor]:
    """Twelve rows of a step: x [12, 1], y [12, 1]."""
    g = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).unsqueeze(1)
    return x, torch.tanh(2 * x - 0.5) + NOISE * torch.randn(12, 1, generator=g, dtype=x.dtype)


def evidence(points: int = 201, widest: float = 6.0) -> float:
    """log p(y) of the four weights under N(0, 1): over a grid of (w, b), the rest in closed form,
    y | w, b ~ N(0, hhᵀ + 11ᵀ + σ²I), h = tanh(w x + b)."""
    x, y = few_rows()
    axis = torch.linspace(-widest, widest, points, dtype=torch.float64)
    w, b = (t.reshape(-1, 1) for t in torch.meshgrid(axis, axis, indexing="ij"))
    h = torch.tanh(w * x.T + b)  # [grid, rows]
    eye = NOISE**2 * torch.eye(len(x), dtype=x.dtype)
    covariance = h.unsqueeze(2) * h.unsqueeze(1) + 1.0 + eye
    fits = MultivariateNormal(torch.zeros_like(y[:, 0]), covariance).log_prob(y[:, 0])
    prior = Normal(0.0, 1.0).log_prob(torch.cat([w, b], 1)).sum(1)
    cell = 2 * math.log(2 * widest / (points - 1))
    return float(torch.logsumexp(fits + prior, 0) + cell)


def bounds(steps: int = 2500, seeds: tuple[int, ...] = (0, 1, 2)) -> dict[str, list[float]]:
    """The bound of each family, for each seed."""
    net = small(1).double()
    families = {
        "mean-field": doxa.MeanField(elbo_samples=400),
        "low rank (1)": doxa.LowRankVI(rank=1, elbo_samples=400),
        "full Gaussian": doxa.FlowVI(flow_length=0, elbo_samples=400),
        "affine flow": doxa.FlowVI(flow="affine", elbo_samples=400),
        "spline flow": doxa.FlowVI(elbo_samples=400),
    }
    found = {}
    for name, method in families.items():
        sweep = doxa.fit(
            net, few_rows(), method, steps=steps, runs=doxa.Runs(seeds=seeds), validation=None,
            likelihood=doxa.Gaussian(noise=NOISE), prior=doxa.Normal(1.0), progress=False,
            subset=every_weight(net),
        )  # fmt: skip
        found[name] = sweep.score("elbo")
    return found


def draw_widths(found: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    x, y = gap_regression(100, seed=21)
    names = [name for name in found if name != "hmc"]
    figure, axes = _figure((15, 5.6), 2, 5)
    at = GRID[:, 0]
    mean, std = found["hmc"]
    spare = axes.flat[len(names) :]
    for ax, name in zip(axes.flat, names, strict=False):
        own_mean, own = found[name]
        ax.axvspan(*GAP, color="#f2f2ee", lw=0)
        for sign in (-2, 2):
            ax.plot(at, mean + sign * std, color=TRUE, lw=1, ls="--")
        ax.fill_between(at, own_mean - 2 * own, own_mean + 2 * own, color=OURS, alpha=0.35, lw=0)
        ax.plot(at, own_mean, color=OURS, lw=1.3)
        ax.plot(at, gap_function(at.numpy()), color=INK, lw=0.7, ls=":")
        ax.plot(x[:, 0], y, ".", ms=2.2, color=INK)
        ax.set_ylim(-3.8, 3.8)
        share = in_gap(own) / in_gap(std)
        ax.set_title(f"{name}: {share:.2f} of HMC's width", fontsize=10, color=INK)
    for ax in spare:
        ax.axis("off")
        legend = "bands: mean ± 2 epistemic std\ndashed: HMC's on the same model\ndotted: the truth"
        ax.text(0.02, 0.5, legend, fontsize=10, color=INK, va="center")
    figure.savefig(path, dpi=110)


def draw_dropout(found: dict[str, Tensor], path: Path) -> None:
    figure, axes = _figure((5.6, 3.6), 1, 1)
    ax = axes.item()
    for (name, p), colour in zip(found.items(), (OURS, TRUE), strict=True):
        ax.plot(SIZES, p.median(0).values, "o-", color=colour, label=name, ms=4)
        for row in p:
            ax.plot(SIZES, row, ".", color=colour, alpha=0.4)
    ax.set(xscale="log", yscale="log", xlabel="rows", ylabel="p, learned")
    ax.set_xticks(SIZES, [str(n) for n in SIZES])
    ax.minorticks_off()
    ax.set_title(
        "concrete dropout drops less as rows are added: three seeds", fontsize=10.5, color=INK
    )
    ax.legend(frameon=False)
    figure.savefig(path, dpi=110)


def draw_bounds(found: dict[str, list[float]], exact: float, path: Path) -> None:
    figure, axes = _figure((6.4, 3.6), 1, 1)
    ax = axes.item()
    for i, values in enumerate(found.values()):
        ax.plot([i] * len(values), values, "o", color=OURS, ms=5, alpha=0.7)
    ax.axhline(exact, color=TRUE, lw=1.4)
    ax.text(-0.4, exact, "log evidence", color=TRUE, fontsize=9, va="bottom")
    ax.axhline(exact - math.log(2), color=TRUE, lw=0.8, ls=":")
    ax.text(-0.4, exact - math.log(2), "one mode of two: −log 2", color=TRUE, fontsize=8, va="top")
    ax.set_xticks(range(len(found)), list(found), fontsize=9)
    ax.set_xlim(-0.5, len(found) - 0.5)
    ax.set_ylabel("bound, nats")
    ax.set_title("the bound as q grows richer: three seeds each", fontsize=10.5, color=INK)
    figure.savefig(path, dpi=110)


def _figure(size: tuple[float, float], rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def main(folder: Path, asked: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if "bound" in asked:
        exact, found = evidence(), bounds()
        print(f"log evidence {exact:.3f}")
        for name, values in found.items():
            print(f"  {name:14} " + "  ".join(f"{value:.3f}" for value in values))
        draw_bounds(found, exact, folder / "vi_bound.png")
    if "dropout" in asked:
        rates = dropout_rates()
        for name, p in rates.items():
            print(
                name,
                "  ".join(f"{n}: {v:.4f}" for n, v in zip(SIZES, p.median(0).values, strict=True)),
            )
        draw_dropout(rates, folder / "vi_dropout.png")
    if "width" in asked:
        wide = widths()
        for name, (_, std) in wide.items():
            print(f"{name:16} std in the gap {in_gap(std):.3f}")
        draw_widths(wide, folder / "vi_width.png")


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(".")
    main(where, sys.argv[2:] or ["width", "dropout", "bound"])
