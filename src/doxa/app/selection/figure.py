"""The picture of a comparison of networks: what each criterion says, and whether they agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from doxa.app.figures import FAINT, INK
from doxa.app.selection.result import Evidence
from doxa.app.tables import Array
from doxa.errors import MissingExtra

COLOURS = ("#0b4f8a", "#c8553d", "#3a7d44", "#8e5ea2", "#c28f2c", "#5b6b78", "#3d8fd1", "#7f1d1d")
MARKERS = "osD^vPX*"
_LINEAR = 0.03  # nats a row: nearer to the best than this, the axis is linear


def draw(found: Evidence, path: str | Path | None = None) -> Any:
    """A panel for each criterion: nats a row behind the best candidate, over priors, one line a
    network, scales that were found apart; last, evidence against held-out rows."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install 'doxa[plots]'") from error
    titles = {"evidence": "evidence (Laplace)", "elbo": "bound (ELBO)",
              "held_out": "held-out rows"}  # fmt: skip
    shown = [name for name in titles if any(getattr(row, name) for row in found.fitted)]
    both = "held_out" in shown
    count = len(shown) + both
    figure = Figure(figsize=(3.3 * count + 1.2, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False)[0]
    given = [prior for prior in found.priors if prior not in _found(found)]
    priors = [*given, *(prior for prior in found.priors if prior not in given)]
    behind = {name: _behind(found, name) for name in shown}
    for axis, name in zip(axes, shown, strict=False):
        for k, net in enumerate(found.nets):
            value = {
                row.prior: v
                for row, v in zip(found.fitted, behind[name], strict=True) if row.net == net
            }  # fmt: skip
            for part, line in ((given, "-"), (priors[len(given) :], "")):
                here = [p for p in part if p in value]
                axis.plot(
                    [priors.index(p) for p in here], [value[p] for p in here],
                    MARKERS[k % len(MARKERS)] + line, color=_colour(k), ms=6, lw=1.3,
                    label=net if line else None,
                )  # fmt: skip
        axis.set_xticks(range(len(priors)), [_short(p) for p in priors], rotation=35, ha="right")
        axis.set_xlim(-0.4, len(priors) - 0.6)
        axis.set_title(titles[name], color=INK)
        _nats(axis.yaxis, axis.set_yscale, axis.set_ylim, behind[name])
    axes[0].set_ylabel("nats a row behind the best", color=INK)
    if both:
        last = axes[-1]
        for k, net in enumerate(found.nets):
            own = [i for i, row in enumerate(found.fitted) if row.net == net]
            last.plot(behind["evidence"][own], behind["held_out"][own], MARKERS[k % len(MARKERS)],
                      color=_colour(k), ms=6, alpha=0.85)  # fmt: skip
        last.set_title(f"rank correlation {found.agreement():.2f}", color=INK)
        last.set_xlabel("evidence", color=INK)
        last.set_ylabel("held-out rows", color=INK)
        _nats(last.xaxis, last.set_xscale, last.set_xlim, behind["evidence"])
        _nats(last.yaxis, last.set_yscale, last.set_ylim, behind["held_out"])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False,
                  title="network")  # fmt: skip
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _behind(found: Evidence, name: str) -> Array:
    """Nats a row below the best mean over splits, [candidates]."""
    mean = found.values(name).mean(1)
    rows = 1 if name == "held_out" else found.train_rows
    return np.asarray((mean.max() - mean) / rows)


def _found(found: Evidence) -> set[str]:
    """Priors whose scale was found: they have no place among those that were given."""
    return {row.prior for row in found.fitted if row.scale}


def _short(prior: str) -> str:
    return prior.replace("std=", "").replace("scale=", "")


def _nats(axis: Any, scale: Any, limit: Any, values: Array) -> None:
    """The best is at the far end; linear near it, then by decades."""
    scale("symlog", linthresh=_LINEAR, linscale=0.5)
    most = 1.6 * max(float(values.max()), _LINEAR)
    limit(most, -0.3 * _LINEAR)
    ticks = [0.0, *(t for t in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0) if t < most)]
    axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_ticks([], minor=True)
    axis.set_tick_params(labelcolor=FAINT)


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]
